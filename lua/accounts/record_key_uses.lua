-- record_key_uses.lua: sets the last use of some of an account's API keys to now.
--
-- A gateway reports uses late. A key that was revoked in the meantime must not leave a time that nothing removes.
--
-- KEYS[1]  hash    the account's full keys: key id -> record (JSON)
-- KEYS[2]  hash    its scoped keys
-- KEYS[3]  hash    times of their last use: key id -> ms
-- ARGV     key ids
--
-- Returns  the number of these keys that exist

local keys, scoped, used = KEYS[1], KEYS[2], KEYS[3]

local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local found = 0
for _, id in ipairs(ARGV) do
  if redis.call('HEXISTS', keys, id) == 1 or redis.call('HEXISTS', scoped, id) == 1 then
    redis.call('HSET', used, id, now)
    found = found + 1
  end
end
return found
