-- redeliver.lua: queues events of an account's log again: one batch, for a caller that has read the log.
-- uses events/deliveries
--
-- An event that waits already is left out, so that a caller can start again after it died half-way. An event waits if its
-- data has more references than the caller saw entries of it in the log. Redeliveries leave half of the partition's stream
-- to what happens, of this account and of others.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  what the accounts' data and logs take
-- ARGV     account, then for each event: id, app, type, marks (two), entries in the log
--
-- Returns  how many were queued

local queued, bodies = 0, KEYS[4]
for n = 2, #ARGV, 6 do
  if redis.call('XLEN', KEYS[1]) >= WAITING / 2 then break end
  local data = redis.call('HGET', bodies, ARGV[n])
  local references = 1 + tonumber(redis.call('HGET', bodies, ARGV[n] .. ':more') or 0)
  if data and references <= tonumber(ARGV[n + 5]) then
    local event = {ARGV[n], ARGV[1], ARGV[n + 1], ARGV[n + 2], data, ARGV[n + 3], ARGV[n + 4]}
    if enqueue(KEYS[1], KEYS[2], KEYS[3], event) == 'queued' then queued = queued + 1 end
  end
end
return queued
