-- take_due_apps.lua: takes the apps of a partition that are due for an inspection.
--
-- An app that is taken is due again later, so that one of many workers inspects it, and another one does if that
-- worker dies. The worker that inspected an app sets its next time, unless the app has become due earlier meanwhile.
--
-- KEYS[1]  zset    app ids by the time at which they are due, ms
-- KEYS[2]  prefix  of the apps' sites; the id is appended here, in the same slot, as for the next key
-- KEYS[3]  prefix  of the monitor's records of them, hashes
-- ARGV     limit, for how long an app is held (ms)
--
-- Returns  {now (ms), until when they are held (ms), {id, live (deploy id or ''), names and values of the record}, …}; of
--          the apps, the longest due first

local schedule, sites, records = KEYS[1], KEYS[2], KEYS[3]
local limit, held_for = ARGV[1], tonumber(ARGV[2])

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local stamp = string.format('%.0f', now)
local held_until = string.format('%.0f', now + held_for)
local found = {stamp, held_until}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', schedule, '-inf', stamp, 'LIMIT', 0, limit)) do
  redis.call('ZADD', schedule, held_until, id)
  local live = redis.call('HGET', sites .. ':' .. id, 'live') or ''
  found[#found + 1] = {id, live, redis.call('HGETALL', records .. ':' .. id)}
end
return found
