-- dead_letter.lua: moves an entry that cannot be processed from its stream to the dead letters.
-- uses events/deliveries
--
-- Without this, workers would claim the entry again and again, and fail on it each time.
--
-- KEYS[1]  stream  the partition's entries: events or builds
-- KEYS[2]  stream  the partition's dead letters, the last 100 of 30 days
-- KEYS[3]  stream  the account's log, KEYS[4] hash the partition's outcomes, KEYS[5] hash the data of the account's events,
--          and KEYS[6] zset bytes that the accounts' data and logs take; only for an event whose fields are complete
-- ARGV     group, entry, name of the stream, reason, the entry's fields (JSON, cut); with an event: id, account, app,
--          type, marks: sample, redelivery. The log records the event as failed
--
-- Returns  1 | 0 if the entry had already been finished or moved

local MAX_DEAD_LETTERS = 100  -- of one partition

local stream, letters, log, outcomes = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, entry, name, reason, fields = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local id, account, app, kind, sample, redelivery = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]

if redis.call('XACK', stream, group, entry) == 0 then return 0 end
redis.call('XDEL', stream, entry)
redis.call('XADD', letters, 'MAXLEN', MAX_DEAD_LETTERS, '*', 'stream', name, 'entry', entry, 'reason', reason,
  'fields', fields)
redis.call('EXPIRE', letters, LOG_SECONDS)
if log then
  local result = {outcome = 'failed', at = string.format('%.0f', now_ms()), reason = 'internal'}
  log_outcome(stream, log, outcomes, {id, account, app, kind, '', sample, redelivery}, result)
end
return 1
