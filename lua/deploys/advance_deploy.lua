-- advance_deploy.lua: moves a deploy to its next state, and does what follows from it in the same step.
-- uses events/deliveries
--
-- The expected state makes the move happen once: of two workers, or a worker and an outside engine, one moves the
-- deploy, and one event is queued.
--
-- KEYS[1]  hash    the deploy's record
-- KEYS[2]  hash    the app's site; queued:<address> follows the deploy that is queued there
-- KEYS[3]  stream  the partition's builds
-- KEYS[4]  stream  the partition's events      KEYS[5]  the account's log      KEYS[6]  the partition's outcomes
-- KEYS[7]  hash    the data of the account's events      KEYS[8]  zset  what the accounts' data and logs take
-- KEYS[9]  hash    how many deploys of the partition ended in each final state
-- KEYS[10] zset    the failed deploys of a day, for operators
-- ARGV     expected state, '1' to take it from the stream, site's live or '', site's source or '',
--          event: id or '' for none, account, app, type, data; then names and values of the record
--
-- Returns  1 | 0 when the deploy is not in that state

if redis.call('HGET', KEYS[1], 'state') ~= ARGV[1] then return 0 end
local fields = {}
for n = 10, #ARGV do fields[#fields + 1] = ARGV[n] end
redis.call('HSET', KEYS[1], unpack(fields))
local found = redis.call('HMGET', KEYS[1], 'address', 'id', 'state', 'account')
if found[1] then
  local queued = 'queued:' .. found[1]
  if ARGV[1] == 'queued' and redis.call('HGET', KEYS[2], queued) == found[2] then redis.call('HDEL', KEYS[2], queued) end
  if found[3] == 'queued' then redis.call('HSETNX', KEYS[2], queued, found[2]) end
end
if ARGV[2] == '1' then redis.call('XDEL', KEYS[3], redis.call('HGET', KEYS[1], 'entry')) end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[2], 'live', ARGV[3])
  if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], 'source', ARGV[4]) end
end
local state = found[3]
if state == 'live' or state == 'failed' or state == 'canceled' then
  redis.call('HINCRBY', KEYS[9], state, 1)
end
if state == 'failed' and found[4] then
  local failed, now = KEYS[10], now_ms()
  redis.call('ZADD', failed, now, found[4] .. ' ' .. found[2])
  redis.call('ZREMRANGEBYSCORE', failed, '-inf', now - 86400000)
  redis.call('ZREMRANGEBYRANK', failed, 0, -101)
  redis.call('EXPIRE', failed, 86400)
end
if ARGV[5] ~= '' then
  enqueue(KEYS[4], KEYS[5], KEYS[6], {ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]})
end
return 1
