-- settle.lua: ends a reservation once.
--
-- The call that removes the reservation's record moves its money. A second call therefore changes nothing, whether it
-- is a retry after a lost answer or a settlement after a release. The money counts for the day of the reservation: for
-- its account, its app, and its user if the app had a cap for users at that time. A release is a settlement at 0.
--
-- A failover may lose the record of a reservation that a gateway was granted. Its settlement therefore carries the
-- contents of the record, and is booked without the record. A tombstone tells a lost reservation from one that has
-- ended. It is written with every settlement. It outlives the time in which a settlement is booked without a record;
-- both count from when it expires.
--
-- The first write is a HDEL, which Redis accepts when its memory is full. After a script's first write it accepts any.
--
-- KEYS[1]  hash    the partition's reservations: id -> "<account> <day> <nano-euro> <app>[ <user>]"
-- KEYS[2]  zset    when they expire: id scored by it, milliseconds
-- KEYS[3]  prefix  of the spend hashes, `…:spend`. The script appends account and day, and for a user's `-by-user`,
--                  account, app, user and day. The keys are in the same slot
-- KEYS[4]  string  the tombstone: the nano-euro settled
-- ARGV     reservation id, cost (nano-euro, or 'max_cost'); from a gateway that knows them also account, day, max_cost,
--          when it expires (milliseconds), app, user ('' for none)
--
-- Returns  {outcome, nano-euro settled}; never more than was reserved. The outcome is 'settled', 'recovered' if the
--          record was lost, 'ended' if the reservation had ended before, or 'unknown'. The last two write nothing, and
--          their sum is 0

local GRACE = 600000   -- milliseconds after it has expired, in which a settlement is booked without a record
local DAYS_35, DAYS_2 = 3024000, 172800  -- seconds that the spend of a day is kept
local MARGIN = 60000   -- milliseconds by which a tombstone outlives that: clocks of a primary and its replica differ

local reservation, cost = ARGV[1], ARGV[2]
local account, day, max_cost, expires, app, user = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local outcome = 'recovered'

local record = redis.call('HGET', KEYS[1], reservation)
if record then
  account, day, max_cost, app, user = string.match(record, '^(%S+) (%S+) (%d+) (%S+) ?(%S*)$')
  expires, outcome = expires or redis.call('ZSCORE', KEYS[2], reservation), 'settled'
elseif redis.call('EXISTS', KEYS[4]) == 1 then
  return {'ended', 0}
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local latest = tonumber(expires or now) + GRACE
if not record and (not account or now >= latest) then return {'unknown', 0} end

if cost == 'max_cost' or tonumber(cost) > tonumber(max_cost) then cost = max_cost end
local spend = KEYS[3] .. ':' .. account .. ':' .. day

-- The reservation set the hash's expiry, unless a failover lost it.
local function book(key, suffix, lifetime)
  local reserved = record and redis.call('HINCRBY', key, 'reserved' .. suffix, '-' .. max_cost)
  redis.call('HINCRBY', key, 'settled' .. suffix, cost)
  if not reserved or reserved < 0 then redis.call('EXPIRE', key, lifetime) end
end

redis.call('HDEL', KEYS[1], reservation)
redis.call('ZREM', KEYS[2], reservation)
book(spend, '', DAYS_35)
book(spend, ':' .. app, DAYS_35)
if user ~= '' then
  book(KEYS[3] .. '-by-user:' .. account .. ':' .. app .. ':' .. user .. ':' .. day, '', DAYS_2)
end
redis.call('SET', KEYS[4], cost, 'PX', string.format('%.0f', math.max(latest - now, 0) + MARGIN))
return {outcome, tonumber(cost)}
