-- register.lua: counts a registration, if today has room for one more.
-- uses calendar
--
-- KEYS[1]  prefix of the counters; the day is appended here (a single key, in no account's partition)
-- KEYS[2]  never exists. While the slot moves, a call with one name runs where the slot is to be, although the counter may
--          still be where it was; a call with two that do not exist waits
-- ARGV     registrations a day
--
-- Returns  {1 | 0, seconds until 00:00 UTC}. Only this script knows the day, so it builds the counter's name; all
--          counters share the prefix's hash tag.

local seconds = tonumber(redis.call('TIME')[1])
local counter = KEYS[1] .. ':' .. utc_day(seconds)
local left = 86400 - seconds % 86400
if tonumber(redis.call('GET', counter) or 0) >= tonumber(ARGV[1]) then return {0, left} end
redis.call('INCR', counter)
redis.call('EXPIRE', counter, 172800)
return {1, left}
