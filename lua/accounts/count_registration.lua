-- count_registration.lua: counts a registration, if the day's limits allow one more.
-- uses calendar
--
-- Registrations of people who sign in have only the limit of all. Those without a sign-in have a limit of their own too,
-- so that they cannot use up the day.
--
-- KEYS[1]  prefix of the counters; the day is appended here, and `:anonymous` for those without a sign-in (a single key,
--          in no account's partition)
-- KEYS[2]  never exists. While the slot migrates, Redis runs a call with one key on the slot's new node, although the
--          counter may still be on the old one. A call with two keys that do not exist waits
-- ARGV     registrations per day, those without a sign-in ('' for one with a sign-in)
--
-- Returns  {'counted' | 'full' | 'anonymous full', seconds until 00:00 UTC}. Only this script knows the day, so it builds
--          the counters' names; all share the prefix's hash tag.

local KEPT_SECONDS = 172800

local prefix, limit, anonymous_limit = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])

local seconds = tonumber(redis.call('TIME')[1])
local counter = prefix .. ':' .. utc_day(seconds)
local anonymous = counter .. ':anonymous'
local left = 86400 - seconds % 86400

local function is_full(key, allowed)
  return tonumber(redis.call('GET', key) or 0) >= allowed
end

local function count(key)
  redis.call('INCR', key)
  redis.call('EXPIRE', key, KEPT_SECONDS)
end

if is_full(counter, limit) then return {'full', left} end
if anonymous_limit and is_full(anonymous, anonymous_limit) then return {'anonymous full', left} end
count(counter)
if anonymous_limit then count(anonymous) end
return {'counted', left}
