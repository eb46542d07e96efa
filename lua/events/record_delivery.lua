-- record_delivery.lua: records the outcome of an event.
-- uses events/deliveries
--
-- Acknowledges, removes and logs the event in one step. A worker that dies before this step leaves the event to another
-- worker, and a worker that dies after it has lost nothing. Only the call that acknowledges the entry logs it, so each
-- event has one outcome.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  bytes that the accounts' data and logs take
-- KEYS[6]  string  an app.unhealthy's outcome, while its recovery may follow
-- ARGV     group, entry, id, account, app, type, outcome, at (ms), duration (ms), status or '', reason or '', url or '',
--          headers (JSON) and body (text) of the answer, or '', marks of the event: sample, redelivery
--
-- Returns  1 | 0 if the entry already had an outcome

local stream, log, outcomes, awaited = KEYS[1], KEYS[2], KEYS[3], KEYS[6]
local group, entry = ARGV[1], ARGV[2]
local id, account, app, kind = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local result = {outcome = ARGV[7], at = ARGV[8], duration = ARGV[9], status = ARGV[10], reason = ARGV[11],
  url = ARGV[12], headers = ARGV[13], body = ARGV[14]}
local sample, redelivery = ARGV[15], ARGV[16]

if redis.call('XACK', stream, group, entry) == 0 then return 0 end
redis.call('XDEL', stream, entry)
log_outcome(stream, log, outcomes, {id, account, app, kind, '', sample, redelivery}, result)
-- A receiver that got an app.unhealthy gets its app.recovered too. A redelivery that fails does not undo that.
if kind == 'app.unhealthy' and redis.call('GET', awaited) ~= 'delivered' then
  redis.call('SET', awaited, result.outcome, 'XX', 'KEEPTTL')
end
return 1
