-- deliveries.lua: functions that the scripts of event deliveries share. This file is not a script of its own: a script
-- names it in a line `-- uses events/deliveries`, and the loader puts its text in front of the script's.
--
-- An event waits as one entry of its partition's stream until its outcome is known. Then it moves to its account's log.
-- So the stream's length is the number of waiting events, and no waiting event is ever trimmed.
--
-- An event's data is stored once, in its account's bodies. The entry of the stream and each entry of the log hold a
-- reference: the event's id. The data is removed with the last reference. The bytes of an account's bodies and log are
-- counted and limited. When a new event does not fit, the oldest entries of the log are removed. An event that still does
-- not fit, because too many events wait, is dropped.
--
--   stream   `{pNN}:events`                  entries id, account, app, type, at (ms), and marks
--   log      `{pNN}:deliveries:<account>`    stream of outcomes, the last 1,000 of 30 days, as far as they fit
--   bodies   `<log>:bodies`                  hash: event id -> data (JSON); `<event id>:more` -> references beyond one
--   outcomes `{pNN}:outcomes`                hash: outcome -> number of deliveries
--   stored   `<stream>:stored`               zset: account -> bytes of its bodies and its log

local MAX_WAITING = 100000       -- events of one partition
local MAX_DELIVERIES = 1000      -- outcomes of one account
local LOG_SECONDS = 30 * 86400
local SHARE_BYTES = 8388608      -- of the bodies and the log of one account
local OVERHEAD_BYTES = 150       -- counted for an entry or a body in addition to its values

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

local function size_of(fields)
  local size = OVERHEAD_BYTES
  for n = 2, #fields, 2 do size = size + #tostring(fields[n]) end
  return size
end

local function count_bytes(stored, account, bytes)
  if tonumber(redis.call('ZINCRBY', stored, bytes, account)) <= 0 then redis.call('ZREM', stored, account) end
end

-- Adds a reference to an event's data, and the data unless it is stored already. Returns the number of bytes added.
local function hold_body(bodies, id, data)
  if redis.call('HSETNX', bodies, id, data) == 1 then return OVERHEAD_BYTES + #data end
  redis.call('HINCRBY', bodies, id .. ':more', 1)
  return 0
end

-- Removes a reference, and the data with the last one. Returns the number of bytes freed.
local function release_body(bodies, id)
  local more = redis.call('HINCRBY', bodies, id .. ':more', -1)
  if more >= 1 then return 0 end
  redis.call('HDEL', bodies, id .. ':more')
  if more == 0 then return 0 end
  local length = redis.call('HSTRLEN', bodies, id)
  return redis.call('HDEL', bodies, id) * (OVERHEAD_BYTES + length)
end

-- Removes entries of the log, oldest first: those before `since` (ms), those beyond the limit after `added` new ones, and
-- as many more as `bytes` need to fit into the account's share. Returns whether they fit.
local function make_room(stream, log, account, bytes, added, since)
  local stored, length = stream .. ':stored', redis.call('XLEN', log)
  local used = tonumber(redis.call('ZSCORE', stored, account) or 0)
  while length > 0 do
    local enough = used + bytes <= SHARE_BYTES and length + added <= MAX_DELIVERIES
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
  return used + bytes <= SHARE_BYTES
end

-- Appends the marks of an event: whether it is a sample ('1' or ''), and the number of its redeliveries, this one included
-- ('' for none).
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

-- Writes an outcome to the log, which takes over the stream's reference to the event's data.
-- event: {id, account, app, type, nothing, marks…}
-- result: outcome, at (ms), and if known: duration (ms), status, reason, url, headers (JSON) and body (text) of the answer
local function log_outcome(stream, log, outcomes, event, result)
  local fields = {'id', event[1], 'type', event[4], 'app', event[3], 'at', result.at,
    'durationMs', result.duration or 0, 'outcome', result.outcome, 'status', result.status or '',
    'error', result.reason or '', 'url', result.url or '', 'headers', result.headers or '', 'body', result.body or ''}
  add_marks(fields, event)
  local size = size_of(fields)
  make_room(stream, log, event[2], size, 1, 0)  -- written even if it does not fit: the number of entries is limited
  redis.call('XADD', log, '*', unpack(fields))
  count_bytes(stream .. ':stored', event[2], size)
  redis.call('EXPIRE', log, LOG_SECONDS)
  redis.call('EXPIRE', log .. ':bodies', LOG_SECONDS)
  redis.call('HINCRBY', outcomes, result.outcome, 1)
  if fields[16] ~= '' then redis.call('HINCRBY', outcomes, result.outcome .. ':' .. fields[16], 1) end
end

-- Queues an event: {id, account, app, type, data, marks…}. Returns 'queued', or 'dropped' if the partition's stream is
-- full or waiting events use up the account's share. The log records a dropped event.
local function enqueue(stream, log, outcomes, event)
  local now, bodies, stored = now_ms(), log .. ':bodies', stream .. ':stored'
  local at = string.format('%.0f', now)
  -- The first write below must be one that Redis refuses when its memory is full: after any write it refuses no other.
  if redis.call('EXISTS', bodies, log) == 0 then
    redis.call('ZADD', stored, 0, event[2])  -- both have expired, so their bytes no longer count
  end
  local fits = make_room(stream, log, event[2], OVERHEAD_BYTES + #event[5], 0, now - LOG_SECONDS * 1000)
  if fits then count_bytes(stored, event[2], hold_body(bodies, event[1], event[5])) end
  redis.call('EXPIRE', bodies, LOG_SECONDS)
  redis.call('EXPIRE', log, LOG_SECONDS)
  if not fits or redis.call('XLEN', stream) >= MAX_WAITING then
    log_outcome(stream, log, outcomes, event, {outcome = 'dropped', at = at, reason = 'overflow'})
    return 'dropped'
  end
  local fields = {'id', event[1], 'account', event[2], 'app', event[3], 'type', event[4], 'at', at}
  redis.call('XADD', stream, '*', unpack(add_marks(fields, event)))
  return 'queued'
end
