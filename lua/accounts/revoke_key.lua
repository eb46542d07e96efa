-- revoke_key.lua: removes an API key from an account, unless it is the account's only key with full access and the
-- caller keeps that.
--
-- Counts and removes in one step: two requests that revoke the last two keys at once must not leave the account
-- without any.
--
-- KEYS[1]  hash    the account's full keys: key id -> record (JSON)
-- KEYS[2]  hash    its scoped keys
-- KEYS[3]  hash    times of their last use: key id -> ms
-- ARGV     key id, '1' to remove even the only full key (otherwise '')
--
-- Returns  {'revoked' | 'last' | 'unknown', the record of the revoked key, or ''}

local keys, scoped, used = KEYS[1], KEYS[2], KEYS[3]
local id, even_last = ARGV[1], ARGV[2] == '1'

-- The version before adds scoped keys to the list of full ones. Only their records name a scope.
local function is_full(record)
  return (cjson.decode(record).scope or 'full') == 'full'
end

local record = redis.call('HGET', keys, id) or redis.call('HGET', scoped, id)
if not record then return {'unknown', ''} end
if is_full(record) and not even_last then
  local full = 0
  for _, each in ipairs(redis.call('HVALS', keys)) do
    if is_full(each) then full = full + 1 end
  end
  if full == 1 then return {'last', ''} end
end
redis.call('HDEL', keys, id)
redis.call('HDEL', scoped, id)
redis.call('HDEL', used, id)
return {'revoked', record}
