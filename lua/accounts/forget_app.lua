-- forget_app.lua: adds the spend of a deleted app to one number for all deleted apps, so that the day's hash does not
-- grow with each app that is created and deleted.
--
-- KEYS[1]  hash    the account's spend of the day
-- ARGV     app
--
-- Returns  1 | 0 if the app spent nothing, or still has a reservation: then its fields stay as long as the hash

local spend, app = KEYS[1], ARGV[1]

local settled, reserved = 'settled:' .. app, 'reserved:' .. app
local spent = redis.call('HGET', spend, settled)
if not spent or tonumber(redis.call('HGET', spend, reserved) or 0) ~= 0 then return 0 end
redis.call('HINCRBY', spend, 'settled:deleted', spent)
redis.call('HDEL', spend, settled, reserved)
return 1
