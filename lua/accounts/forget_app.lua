-- forget_app.lua: adds what a deleted app spent on a day to one number for all of them, so that the day's hash does not
-- grow with each app that comes and goes.
--
-- KEYS[1]  hash    the account's spend of the day
-- ARGV     app
--
-- Returns  1 | 0 if it spent nothing, or something is still reserved for it: then its fields stay for the hash's life

local settled, reserved = 'settled:' .. ARGV[1], 'reserved:' .. ARGV[1]
local spent = redis.call('HGET', KEYS[1], settled)
if not spent or tonumber(redis.call('HGET', KEYS[1], reserved) or 0) ~= 0 then return 0 end
redis.call('HINCRBY', KEYS[1], 'settled:deleted', spent)
redis.call('HDEL', KEYS[1], settled, reserved)
return 1
