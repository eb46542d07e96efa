-- emit.lua: queues an event for delivery.
-- uses events/deliveries
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  what the accounts' data and logs take
-- KEYS[6]  string  mark that this id was emitted; optional. With it, a call whose answer was lost can be repeated
-- ARGV     id, account, app (name, or ''), type, data (JSON)
--
-- Returns  'queued' | 'dropped'

if KEYS[6] and not redis.call('SET', KEYS[6], '1', 'NX', 'EX', 3600) then return 'queued' end
return enqueue(KEYS[1], KEYS[2], KEYS[3], ARGV)
