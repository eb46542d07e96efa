-- request_event.lua: queues an event that an account holder asks for: a sample, or an event of the log again.
-- uses rate_window
-- uses events/deliveries
--
-- Checks the account's window and queues the event in one step, so that of any number of concurrent requests exactly as
-- many pass as the window allows. A request that passes counts even if the log does not have the event or the stream is
-- full, because searching the log costs time too.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  bytes that the accounts' data and logs take
-- KEYS[6]  rate window of the account
-- ARGV     requests in 60 s, id, account, then app (name), type and data (JSON) of a sample. Without these three: the
--          newest event of this id in the log, if its data is still stored
--
-- Returns  {'queued' | 'dropped' | 'rate' | 'unknown', microseconds until the next request can pass}

local PAGE = 50  -- entries of the log, each with the beginning of an answer

local stream, log, outcomes, bodies, window = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[6]
local limit, id, account = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local sample_app, sample_type, sample_data = ARGV[4], ARGV[5], ARGV[6]

local function find_entry(oldest)
  local last = '+'
  while true do
    local entries = redis.call('XREVRANGE', log, last, oldest, 'COUNT', PAGE)
    for _, entry in ipairs(entries) do
      local fields = {}
      for n = 1, #entry[2], 2 do fields[entry[2][n]] = entry[2][n + 1] end
      if fields.id == id then return fields end
    end
    if #entries < PAGE then return nil end
    last = '(' .. entries[#entries][1]
  end
end

local now = now_us()
local count, frees = rate_window.check(window, limit, now)
if count >= limit then return {'rate', string.format('%.0f', frees)} end
rate_window.record(window, now, frees)

local event = {id, account, sample_app, sample_type, sample_data, '1'}
if not sample_app then
  local found = find_entry(string.format('%.0f', math.floor(now / 1000) - LOG_SECONDS * 1000))
  local data = found and redis.call('HGET', bodies, id)
  if not data then return {'unknown', '0'} end
  local redelivery = string.format('%.0f', (tonumber(found.redelivery) or 0) + 1)
  event = {id, account, found.app, found.type, data, found.sample, redelivery}
end
return {enqueue(stream, log, outcomes, event), '0'}
