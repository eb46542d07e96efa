-- dead_letter.lua: takes an entry that can't be processed out of its stream, and keeps it as a dead letter.
-- uses events/deliveries
--
-- Without this, the entry would be claimed again without end, and what fails on it would fail again.
--
-- KEYS[1]  stream  the partition's entries: events or builds
-- KEYS[2]  stream  the partition's dead letters, the last 100 of 30 days
-- KEYS[3]  stream  the account's log, KEYS[4] hash the partition's outcomes, KEYS[5] hash the data of the account's events,
--          and KEYS[6] zset what the accounts' data and logs take; only for an event whose fields are whole
-- ARGV     group, entry, name of the stream, reason, the entry's fields (JSON, cut); with an event: id, account, app,
--          type, marks; the log records it as failed
--
-- Returns  1 | 0 if the entry had been finished or buried before

local BURIED = 100  -- dead letters of one partition

if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', BURIED, '*', 'stream', ARGV[3], 'entry', ARGV[2], 'reason', ARGV[4],
  'fields', ARGV[5])
redis.call('EXPIRE', KEYS[2], DAYS)
if KEYS[3] then
  local event = {ARGV[6], ARGV[7], ARGV[8], ARGV[9], '', ARGV[10], ARGV[11]}
  local result = {outcome = 'failed', at = string.format('%.0f', now_ms()), reason = 'internal'}
  log_outcome(KEYS[1], KEYS[3], KEYS[4], event, result)
end
return 1
