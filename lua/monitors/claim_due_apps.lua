-- claim_due_apps.lua: takes the apps of a partition that are due for an inspection.
--
-- A taken app is due again only when its lease ends, so that one of many workers inspects it. The lease covers a worker
-- that dies. The worker that inspected an app sets when it is due next.
--
-- KEYS[1]  zset    app ids by when they are due, ms
-- KEYS[2]  prefix  of the apps' sites; the id is appended here, in the same slot, as in the next
-- KEYS[3]  prefix  of what is known of them, a hash
-- ARGV     limit, lease (ms)
--
-- Returns  {now (ms), {id, live (deploy id or ''), names and values of what is known}, …}, the longest due first

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local stamp = string.format('%.0f', now)
local taken = {stamp}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', stamp, 'LIMIT', 0, ARGV[1])) do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), id)
  local live = redis.call('HGET', KEYS[2] .. ':' .. id, 'live') or ''
  taken[#taken + 1] = {id, live, redis.call('HGETALL', KEYS[3] .. ':' .. id)}
end
return taken
