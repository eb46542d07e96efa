-- hold_engine.lua: takes, renews or ends the lease of the one worker that changes what a cluster serves.
--
-- KEYS[1]  string  the worker that holds the lease
-- ARGV     worker, milliseconds that the lease lasts (0 ends it)
--
-- Returns  1 if the worker holds the lease now, else 0

local engine = KEYS[1]
local worker, lifetime = ARGV[1], tonumber(ARGV[2])

if (redis.call('GET', engine) or worker) ~= worker then return 0 end
if lifetime == 0 then
  redis.call('DEL', engine)
  return 0
end
redis.call('SET', engine, worker, 'PX', lifetime)
return 1
