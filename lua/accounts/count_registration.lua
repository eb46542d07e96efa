-- count_registration.lua: counts a registration, if the day's limit allows one more.
-- uses calendar
--
-- KEYS[1]  prefix of the counters; the day is appended here (a single key, in no account's partition)
-- KEYS[2]  never exists. While the slot migrates, Redis runs a call with one key on the slot's new node, although the
--          counter may still be on the old one. A call with two keys that do not exist waits
-- ARGV     registrations per day
--
-- Returns  {1 | 0, seconds until 00:00 UTC}. Only this script knows the day, so it builds the counter's name; all
--          counters share the prefix's hash tag.

local prefix, limit = KEYS[1], tonumber(ARGV[1])

local seconds = tonumber(redis.call('TIME')[1])
local counter = prefix .. ':' .. utc_day(seconds)
local left = 86400 - seconds % 86400
if tonumber(redis.call('GET', counter) or 0) >= limit then return {0, left} end
redis.call('INCR', counter)
redis.call('EXPIRE', counter, 172800)
return {1, left}
