-- move_scoped_keys.lua: moves an account's scoped API keys out of the list of full keys, where a version that knows no
-- scopes would take them for full ones.
--
-- Reads and moves in one step: a key that is revoked meanwhile must not come back.
--
-- KEYS[1]  hash    the account's full keys: key id -> record (JSON)
-- KEYS[2]  hash    its scoped keys
--
-- Returns  the number of keys that were moved

local keys, scoped = KEYS[1], KEYS[2]

local moved, records = 0, redis.call('HGETALL', keys)
for i = 1, #records, 2 do
  local id, record = records[i], records[i + 1]
  if (cjson.decode(record).scope or 'full') ~= 'full' then
    redis.call('HSET', scoped, id, record)
    redis.call('HDEL', keys, id)
    moved = moved + 1
  end
end
return moved
