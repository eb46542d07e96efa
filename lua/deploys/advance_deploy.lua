-- advance_deploy.lua: moves a deploy to its next state, and applies the consequences in the same step.
-- uses events/deliveries
--
-- The expected state makes the move happen once: of two workers, or a worker and an external engine, one moves the
-- deploy, and one event is queued.
--
-- KEYS[1]  hash    the deploy's record
-- KEYS[2]  hash    the app's site; queued:<address> names the deploy that is queued for that address
-- KEYS[3]  stream  the partition's builds
-- KEYS[4]  stream  the partition's events      KEYS[5]  the account's log      KEYS[6]  the partition's outcomes
-- KEYS[7]  hash    the data of the account's events      KEYS[8]  zset  bytes that the accounts' data and logs take
-- KEYS[9]  hash    number of the partition's deploys that ended in each final state
-- KEYS[10] zset    the failed deploys of a day, for operators
-- KEYS[11] zset    the account's previews by last visit; a preview that goes live counts as visited, and the site's
--                  preview:<address> names its deploy
-- ARGV     expected state, '1' to remove it from the stream, site's live or '', its source or '' for none stored,
--          event: id or '' for none, account, app, type, data; then names and values of the record
--
-- Returns  1 | 0 when the deploy is not in that state

local deploy, site, builds, stream, log, outcomes = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local ended, failed, previews = KEYS[9], KEYS[10], KEYS[11]
local expected, dequeue, live, source = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local event = {ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]}

if redis.call('HGET', deploy, 'state') ~= expected then return 0 end
local fields = {}
for n = 10, #ARGV do fields[#fields + 1] = ARGV[n] end
redis.call('HSET', deploy, unpack(fields))
local found = redis.call('HMGET', deploy, 'address', 'id', 'state', 'account', 'appId')
local address, id, state, account, app = unpack(found)
local queued = 'queued:' .. address
if expected == 'queued' and redis.call('HGET', site, queued) == id then redis.call('HDEL', site, queued) end
if state == 'queued' then redis.call('HSETNX', site, queued, id) end
if dequeue == '1' then redis.call('XDEL', builds, redis.call('HGET', deploy, 'entry')) end
if live ~= '' then
  redis.call('HSET', site, 'live', live)
  if source ~= '' then redis.call('HSET', site, 'source', source) else redis.call('HDEL', site, 'source') end
end
if state == 'live' and address ~= 'live' then
  redis.call('HSET', site, 'preview:' .. address, id)
  redis.call('ZADD', previews, string.format('%.3f', now_ms() / 1000), app .. ' ' .. address)
end
if state == 'live' or state == 'failed' or state == 'canceled' then
  redis.call('HINCRBY', ended, state, 1)
end
if state == 'failed' then
  local now = now_ms()
  redis.call('ZADD', failed, now, account .. ' ' .. id)
  redis.call('ZREMRANGEBYSCORE', failed, '-inf', now - 86400000)
  redis.call('ZREMRANGEBYRANK', failed, 0, -101)
  redis.call('EXPIRE', failed, 86400)
end
if event[1] ~= '' then enqueue(stream, log, outcomes, event) end
return 1
