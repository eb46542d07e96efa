-- due.lua: which apps of a partition are due for a look? They are taken in the same step.
--
-- An app that is taken is due again only when its lease is over, so that of any number of workers one looks at it; the
-- lease is there for a worker that dies. Whoever has looked says when the next look is due.
--
-- KEYS[1]  zset    app ids by when they are due, ms
-- KEYS[2]  prefix  of the apps' sites; the id is appended here, in the same slot, as in the next
-- KEYS[3]  prefix  of what is known of them, a hash
-- ARGV     how many at the most, lease (ms)
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
