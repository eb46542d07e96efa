-- settle.lua: ends one reservation, once.
--
-- The call that removes the reservation's record moves its money, so a second call, a retry after a lost answer, or a
-- settlement after a release changes nothing. The money counts for the day of the reservation, for its account and its
-- app, and for its user if the app had a cap for users at the time. A release is a settlement at 0.
--
-- A failover may lose the record of a reservation that a gateway was granted. Its settlement therefore carries what the
-- record held, and is booked without the record. A tombstone tells a reservation that was lost from one that has ended: it
-- is written with every settlement and outlives the time in which a settlement is booked without a record, which both
-- count from the end of the lease.
--
-- The first write is a HDEL, which Redis takes when its memory is full. After a script's first write it takes any.
--
-- KEYS[1]  hash    the partition's reservations: id -> "<account> <day> <nano-euro> <app>[ <user>]"; records that older
--                  gateways wrote end after the nano-euro
-- KEYS[2]  zset    their leases: id scored by the end of its lease, milliseconds
-- KEYS[3]  prefix  of the spend hashes, `…:spend`; account and day are appended here, in the same slot, and for a user's
--                  `-by-user`, account, app, user and day
-- KEYS[4]  string  the tombstone: the nano-euro settled
-- ARGV     reservation id, cost (nano-euro, or 'bound'); from a gateway that knows them also account, day, bound, end of
--          the lease (milliseconds), app, user ('' for none)
--
-- Returns  {outcome, nano-euro settled}; never more than was reserved. The outcome is 'settled', 'recovered' where the
--          record was lost, 'ended' where the reservation had ended before, or 'unknown'; the last two write nothing

local GRACE = 600000   -- milliseconds after the end of a lease in which a settlement is booked without a record
local DAYS_35, DAYS_2 = 3024000, 172800  -- seconds that the spend of a day is kept
local MARGIN = 60000   -- milliseconds by which a tombstone outlives that: clocks of a primary and its replica differ

local record = redis.call('HGET', KEYS[1], ARGV[1])
local account, day, reserved, app, user, lease_end, outcome
if record then
  account, day, reserved, app, user = string.match(record, '^(%S+) (%S+) (%d+) ?(%S*) ?(%S*)$')
  lease_end, outcome = ARGV[6] or redis.call('ZSCORE', KEYS[2], ARGV[1]), 'settled'
else
  if redis.call('EXISTS', KEYS[4]) == 1 then return {'ended', 0} end
  account, day, reserved, lease_end, outcome = ARGV[3], ARGV[4], ARGV[5], ARGV[6], 'recovered'
  app, user = ARGV[7], ARGV[8]
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local latest = tonumber(lease_end or now) + GRACE
if not record and (not account or now >= latest) then return {'unknown', 0} end

local cost = ARGV[2]
if cost == 'bound' or tonumber(cost) > tonumber(reserved) then cost = reserved end
local spend = KEYS[3] .. ':' .. account .. ':' .. day

-- The hash has its expiry since the reservation, unless a failover lost that.
local function book(key, suffix, lifetime)
  local held = record and redis.call('HINCRBY', key, 'reserved' .. suffix, '-' .. reserved)
  redis.call('HINCRBY', key, 'settled' .. suffix, cost)
  if not held or held < 0 then redis.call('EXPIRE', key, lifetime) end
end

redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
book(spend, '', DAYS_35)
if app ~= '' then book(spend, ':' .. app, DAYS_35) end
if user ~= '' then
  book(KEYS[3] .. '-by-user:' .. account .. ':' .. app .. ':' .. user .. ':' .. day, '', DAYS_2)
end
redis.call('SET', KEYS[4], cost, 'PX', string.format('%.0f', math.max(latest - now, 0) + MARGIN))
return {outcome, tonumber(cost)}
