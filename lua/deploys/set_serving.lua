-- set_serving.lua: sets what is served at one address of an app.
--
-- A builder that was paused until another builder took over its deploy must not change anything: by then the deploy is in
-- another state, or the address's record is no longer the one that the builder read.
--
-- KEYS[1]  hash    the deploy's record
-- KEYS[2]  hash    the app's addresses: address → the release to serve, JSON
-- KEYS[3]  zset    the partition's apps by the version of their last change
-- ARGV     state in which the deploy must be ('' for any), app, address, its record as it was read ('' for none),
--          its new record ('' for none), and the channel on which the change of KEYS[3] is announced
--
-- Returns  1 when it was written, else 0

local deploy, serving, served_apps = KEYS[1], KEYS[2], KEYS[3]
local state, app, address, before, after, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

if state ~= '' and redis.call('HGET', deploy, 'state') ~= state then return 0 end
if (redis.call('HGET', serving, address) or '') ~= before then return 0 end
-- A version is a time, or one more than the last version. So versions grow even after the app with the last one was
-- removed.
local time = redis.call('TIME')
local version = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local last = redis.call('ZREVRANGE', served_apps, 0, 0, 'WITHSCORES')
if last[2] then version = math.max(version, tonumber(last[2]) + 1) end
if after ~= '' then redis.call('HSET', serving, address, after) else redis.call('HDEL', serving, address) end
redis.call('ZADD', served_apps, string.format('%.0f', version), app)
redis.call('PUBLISH', channel, served_apps)
return 1
