-- emit_event.lua: queues an event for delivery.
-- uses events/deliveries
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  bytes that the accounts' data and logs take
-- KEYS[6]  string  mark that this id was emitted; optional. With it, a caller that got no answer can repeat the call
-- ARGV     id, account, app (name, or ''), type, data (JSON)
--
-- Returns  'queued' | 'dropped'

local stream, log, outcomes, emitted = KEYS[1], KEYS[2], KEYS[3], KEYS[6]
local event = ARGV

if emitted and not redis.call('SET', emitted, '1', 'NX', 'EX', 3600) then return 'queued' end
return enqueue(stream, log, outcomes, event)
