-- set_serving.lua: says what the hosts shall serve at one address of an app.
--
-- A builder that was paused until another one took its deploy over must direct nothing any more: the deploy is then in
-- another state, or the address's record is no longer the one that the builder read.
--
-- KEYS[1]  hash    the deploy's record
-- KEYS[2]  hash    the app's addresses: address → what to serve, JSON
-- KEYS[3]  zset    the partition's apps by the version of their last change
-- ARGV     state in which the deploy must be ('' for any), app, address, its record as it was read ('' for none),
--          its new record
--
-- Returns  1 when it was written, else 0

if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], 'state') ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[2], ARGV[3]) or '') ~= ARGV[4] then return 0 end
-- Versions grow even when the app with the last one was forgotten: they are times, where the clock allows.
local time = redis.call('TIME')
local version = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local last = redis.call('ZREVRANGE', KEYS[3], 0, 0, 'WITHSCORES')
if last[2] then version = math.max(version, tonumber(last[2]) + 1) end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[5])
redis.call('ZADD', KEYS[3], string.format('%.0f', version), ARGV[2])
return 1
