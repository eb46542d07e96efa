-- copy_keys.lua: reads several keys of a partition, with their types and expiries, in one step.
--
-- A backup reads the records of an account with one call. Read one after the other, they could be of different moments,
-- such as an app that is on its account's list and has no site.
--
-- KEYS     the keys, of any type but stream
--
-- Returns  for each key {type, expiry, values}: 'none' for a key that does not exist; the expiry is in milliseconds since
--          the epoch, or -1; the values are those of a string, a set or a list, or names and values of a hash, or members
--          and scores of a zset. A stream has no values.

local READ = {
  string = function(key) return {redis.call('GET', key)} end,
  hash = function(key) return redis.call('HGETALL', key) end,
  set = function(key) return redis.call('SMEMBERS', key) end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
}

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local found = {}
for n, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key)['ok']
  local left = redis.call('PTTL', key)
  found[n] = {kind, left < 0 and -1 or now + left, READ[kind] and READ[kind](key) or {}}
end
return found
