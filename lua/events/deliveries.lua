-- deliveries.lua: shared by the scripts of event deliveries. Not a script of its own: a script names it in a line
-- `-- uses events/deliveries`, and the loader puts its text in front.
--
-- An event waits as one entry of its partition's stream until its outcome is known; then it is removed from there and
-- written to its account's log. So the stream's length is the number of waiting events, and none of them is trimmed.
--
-- An event's data is stored once, in its account's bodies. The entry of the stream and each entry of the log hold a
-- reference: the event's id. The data goes when the last reference goes. What the bodies and the log of an account take
-- is counted, and bounded: when a new event does not fit, the oldest entries of the log make room for it. An event that
-- still does not fit, because so many wait, is dropped.
--
--   stream   `{pNN}:events`                  entries id, account, app, type, at (ms), and marks
--   log      `{pNN}:deliveries:<account>`    stream of outcomes, the last 1,000 of 30 days, as far as they fit
--   bodies   `<log>:bodies`                  hash: event id -> data (JSON); `<event id>:more` -> references beyond one
--   outcomes `{pNN}:outcomes`                hash: outcome -> how often
--   stored   `<stream>:stored`               zset: account -> bytes of its bodies and its log

local WAITING = 100000      -- events of one partition
local LOGGED = 1000         -- outcomes of one account
local DAYS = 30 * 86400     -- seconds
local SHARE = 8388608       -- bytes that the bodies and the log of one account may take
local OVERHEAD = 150        -- bytes counted for an entry or a body beside its values

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

local function size_of(fields)
  local size = OVERHEAD
  for n = 2, #fields, 2 do size = size + #tostring(fields[n]) end
  return size
end

local function count_bytes(stored, account, bytes)
  -- Below 0 only when entries go that were never counted: those of an earlier version.
  if tonumber(redis.call('ZINCRBY', stored, bytes, account)) <= 0 then redis.call('ZREM', stored, account) end
end

-- Adds a reference to an event's data, and the data unless it is stored already. Returns the bytes that this takes.
local function hold_body(bodies, id, data)
  if redis.call('HSETNX', bodies, id, data) == 1 then return OVERHEAD + #data end
  redis.call('HINCRBY', bodies, id .. ':more', 1)
  return 0
end

-- Removes a reference, and the data with the last one. Returns the bytes that this frees.
local function release_body(bodies, id)
  local more = redis.call('HINCRBY', bodies, id .. ':more', -1)
  if more >= 1 then return 0 end
  redis.call('HDEL', bodies, id .. ':more')
  if more == 0 then return 0 end
  local length = redis.call('HSTRLEN', bodies, id)
  return redis.call('HDEL', bodies, id) * (OVERHEAD + length)
end

-- Removes entries of the log, the oldest first: those before `since` (ms), those that are too many with `added` new ones,
-- and as many more as are needed for `bytes` to fit into the account's share. Returns whether they fit.
local function make_room(stream, log, account, bytes, added, since)
  local stored, length = stream .. ':stored', redis.call('XLEN', log)
  local used = tonumber(redis.call('ZSCORE', stored, account) or 0)
  while length > 0 do
    local enough = used + bytes <= SHARE and length + added <= LOGGED
    if enough and since == 0 then return true end
    local entry = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
    if enough and tonumber(string.match(entry[1], '^%d+')) >= since then return true end
    local freed = size_of(entry[2])
    for n = 1, #entry[2], 2 do
      if entry[2][n] == 'id' then freed = freed + release_body(log .. ':bodies', entry[2][n + 1]) end
    end
    redis.call('XDEL', log, entry[1])
    count_bytes(stored, account, -freed)
    used, length = used - freed, length - 1
  end
  return used + bytes <= SHARE
end

-- Marks of an event: whether it is a sample ('1' or ''), and how often it was redelivered, with this time ('' for never).
local function add_marks(fields, event)
  for n, name in ipairs({'sample', 'redelivery'}) do
    local mark = event[5 + n] or ''
    if mark ~= '' then
      fields[#fields + 1] = name
      fields[#fields + 1] = mark
    end
  end
  return fields
end

-- event: {id, account, app, type, nothing, marks…}; the log takes over the stream's reference to its data.
-- result: outcome, at (ms), and where there are: duration (ms), status, reason, url, headers (JSON) and body (text) of
-- the answer
local function log_outcome(stream, log, outcomes, event, result)
  local fields = {'id', event[1], 'type', event[4], 'app', event[3], 'at', result.at,
    'durationMs', result.duration or 0, 'outcome', result.outcome, 'status', result.status or '',
    'error', result.reason or '', 'url', result.url or '', 'headers', result.headers or '', 'body', result.body or ''}
  add_marks(fields, event)
  local size = size_of(fields)
  make_room(stream, log, event[2], size, 1, 0)  -- if it does not fit, it is written all the same: these have a bound
  redis.call('XADD', log, '*', unpack(fields))
  count_bytes(stream .. ':stored', event[2], size)
  redis.call('EXPIRE', log, DAYS)
  redis.call('EXPIRE', log .. ':bodies', DAYS)
  redis.call('HINCRBY', outcomes, result.outcome, 1)
  if fields[16] ~= '' then redis.call('HINCRBY', outcomes, result.outcome .. ':' .. fields[16], 1) end
end

-- event: {id, account, app, type, data, marks…}. Returns 'queued', or 'dropped' if the partition's stream is full or the
-- account's share used up by events that wait; the log records that.
local function enqueue(stream, log, outcomes, event)
  local now, bodies, stored = now_ms(), log .. ':bodies', stream .. ':stored'
  local at = string.format('%.0f', now)
  -- The first write below must be one that Redis refuses when its memory is full: after any write it refuses none.
  if redis.call('EXISTS', bodies, log) == 0 then
    redis.call('ZADD', stored, 0, event[2])  -- both have expired, and what was counted of them goes with them
  end
  local fits = make_room(stream, log, event[2], OVERHEAD + #event[5], 0, now - DAYS * 1000)
  if fits then count_bytes(stored, event[2], hold_body(bodies, event[1], event[5])) end
  redis.call('EXPIRE', bodies, DAYS)
  redis.call('EXPIRE', log, DAYS)
  if not fits or redis.call('XLEN', stream) >= WAITING then
    log_outcome(stream, log, outcomes, event, {outcome = 'dropped', at = at, reason = 'overflow'})
    return 'dropped'
  end
  local fields = {'id', event[1], 'account', event[2], 'app', event[3], 'type', event[4], 'at', at}
  redis.call('XADD', stream, '*', unpack(add_marks(fields, event)))
  return 'queued'
end
