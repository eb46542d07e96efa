-- list_expired_reservations.lua: lists the reservations of a partition whose gateway has died.
--
-- A reservation lives longer than the longest stream, so an expired one belongs to a gateway that died. The
-- caller settles each at its maximum cost with settle.lua, because the cost of a dead gateway's stream is unknown.
--
-- KEYS[1]  zset    the partition's reservations: id scored by when it expires, milliseconds
-- ARGV     limit
--
-- Returns  reservation ids, the longest expired first

local limit = ARGV[1]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, limit)
