-- set_claim.lua: sets, or removes, the claim of a host on an app with data.
--
-- The expected claim includes its fence. So a host whose claim was taken over can no longer change it, and what that
-- host stored is never used.
--
-- KEYS[1]  hash    app → its claim, JSON; `version`: the name of the last change
-- ARGV     app, expected claim ('' for none), new claim ('' removes it), name of this change: random, because a number
--          could repeat after a failover that loses writes
--
-- Returns  1 if the claim was set, 0 if it was not the expected one

local claims = KEYS[1]
local app, before, after, change = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if (redis.call('HGET', claims, app) or '') ~= before then return 0 end
if after == '' then
  redis.call('HDEL', claims, app)
else
  redis.call('HSET', claims, app, after)
end
redis.call('HSET', claims, 'version', change)
return 1
