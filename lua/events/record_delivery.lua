-- record_delivery.lua: records the outcome of an event.
-- uses events/deliveries
--
-- Acknowledges, removes and logs the event in one step: a worker that dies before leaves the event to another one, and a
-- worker that dies after has lost nothing. Only the call that acknowledges logs, so there is one outcome.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  what the accounts' data and logs take
-- KEYS[6]  string  an app.unhealthy's outcome, while its recovery may follow
-- ARGV     group, entry, id, account, app, type, outcome, at (ms), duration (ms), status or '', reason or '', url or '',
--          headers (JSON) and body (text) of the answer, or '', marks of the event
--
-- Returns  1 | 0 if the entry already had an outcome

if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
local event = {ARGV[3], ARGV[4], ARGV[5], ARGV[6], '', ARGV[15], ARGV[16]}
local result = {outcome = ARGV[7], at = ARGV[8], duration = ARGV[9], status = ARGV[10], reason = ARGV[11],
  url = ARGV[12], headers = ARGV[13], body = ARGV[14]}
log_outcome(KEYS[1], KEYS[2], KEYS[3], event, result)
-- A receiver that got an app.unhealthy gets its app.recovered too; a redelivery that fails does not undo that.
if ARGV[6] == 'app.unhealthy' and redis.call('GET', KEYS[6]) ~= 'delivered' then
  redis.call('SET', KEYS[6], ARGV[7], 'XX', 'KEEPTTL')
end
return 1
