-- request_event.lua: an account holder asks for an event: a sample, or one of the log once more. May it be sent?
-- uses rate_window
-- uses events/deliveries
--
-- Decides on the account's window and queues the event in one step, so that of any number of requests at once exactly
-- as many pass as the window has room for. A request that passes counts, also when the log does not have the event or
-- too many wait: searching the log is work, too.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  hash    the data of the account's events      KEYS[5]  zset  what the accounts' data and logs take
-- KEYS[6]  list    the account's window: the times (microseconds) of the requests that passed, oldest first
-- ARGV     requests in 60 s, id, account, then app (name), type and data (JSON) of a sample; without these three, the
--          newest event of this id in the log, if its data is still stored
--
-- Returns  {'queued' | 'dropped' | 'rate' | 'unknown', microseconds until the next request can pass}

local PAGE = 50  -- entries of the log, each with the beginning of an answer

local function find(log, id, oldest)
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

local limit, now = tonumber(ARGV[1]), now_us()
local count, frees = rate_window.check(KEYS[6], limit, now)
if count >= limit then return {'rate', string.format('%.0f', frees)} end
rate_window.record(KEYS[6], now, frees)

local event = {ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], '1'}
if not ARGV[4] then
  local oldest = string.format('%.0f', math.floor(now / 1000) - DAYS * 1000)
  local found = find(KEYS[2], ARGV[2], oldest)
  -- Entries of an earlier version have the data themselves.
  local data = found and (redis.call('HGET', KEYS[4], ARGV[2]) or found.data)
  if not data then return {'unknown', '0'} end
  local redelivery = string.format('%.0f', (tonumber(found.redelivery) or 0) + 1)
  event = {ARGV[2], ARGV[3], found.app, found.type, data, found.sample, redelivery}
end
return {enqueue(KEYS[1], KEYS[2], KEYS[3], event), '0'}
