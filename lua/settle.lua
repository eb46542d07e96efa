-- settle.lua: ends one reservation, once.
--
-- The call that removes the reservation's record moves its money, so a second call, a retry after a lost answer, or a
-- settlement after a release changes nothing. The money counts for the day of the reservation. A release is a settlement
-- at 0.
--
-- KEYS[1]  hash    the partition's reservations: id -> "<account> <day> <nano-euro>"
-- KEYS[2]  zset    their leases
-- KEYS[3]  prefix  of the spend hashes, `…:spend`; account and day are appended here, in the same slot
-- ARGV     reservation id, cost (nano-euro, or 'bound')
--
-- Returns  nano-euro settled, or -1 when the reservation had ended before. Never more than was reserved.

local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record then return -1 end
local account, day, reserved = string.match(record, '^(%S+) (%S+) (%d+)$')
local cost = ARGV[2]
if cost == 'bound' or tonumber(cost) > tonumber(reserved) then cost = reserved end
local spend = KEYS[3] .. ':' .. account .. ':' .. day

redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HINCRBY', spend, 'reserved', '-' .. reserved)
redis.call('HINCRBY', spend, 'settled', cost)
redis.call('EXPIRE', spend, 3024000)
return tonumber(cost)
