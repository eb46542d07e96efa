-- overdue.lua: which reservations of a partition has their gateway left behind?
--
-- A lease outlives the longest stream, so a reservation past it belongs to a gateway that died. The caller settles
-- each with settle.lua, at its bound: what a dead gateway's stream cost is not known.
--
-- KEYS[1]  zset    the partition's leases: id scored by the end of its lease, milliseconds
-- ARGV     how many at the most
--
-- Returns  their ids, the longest overdue first

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])
