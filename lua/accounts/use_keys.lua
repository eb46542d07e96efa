-- use_keys.lua: some of an account's API keys were used a moment ago.
--
-- A gateway reports uses late. A key that was revoked in the meantime must not leave a time that nothing removes.
--
-- KEYS[1]  hash    the account's keys: key id -> record (JSON)
-- KEYS[2]  hash    when they were last used: key id -> ms
-- ARGV     key ids
--
-- Returns  how many of the keys there are

local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local used = 0
for _, id in ipairs(ARGV) do
  if redis.call('HEXISTS', KEYS[1], id) == 1 then
    redis.call('HSET', KEYS[2], id, now)
    used = used + 1
  end
end
return used
