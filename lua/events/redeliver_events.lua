-- redeliver_events.lua: queues events of an account's log again: one batch, for a caller that has read the log.
-- uses events/deliveries
--
-- Leaves out an event that already waits, so that a caller that died halfway can start again. An event waits if its data
-- has more references than the caller saw entries of it in the log. Redeliveries leave half of the partition's stream to
-- new events, of this account and of others.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  bytes that the accounts' data and logs take
-- ARGV     account, then for each event: id, app, type, marks (two), entries in the log
--
-- Returns  the number of events that were queued

local stream, log, outcomes, bodies = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local account = ARGV[1]

local queued = 0
for n = 2, #ARGV, 6 do
  local id, app, kind, sample, redelivery = ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3], ARGV[n + 4]
  local entries = tonumber(ARGV[n + 5])
  if redis.call('XLEN', stream) >= MAX_WAITING / 2 then break end
  local data = redis.call('HGET', bodies, id)
  local references = 1 + tonumber(redis.call('HGET', bodies, id .. ':more') or 0)
  if data and references <= entries then
    local event = {id, account, app, kind, data, sample, redelivery}
    if enqueue(stream, log, outcomes, event) == 'queued' then queued = queued + 1 end
  end
end
return queued
