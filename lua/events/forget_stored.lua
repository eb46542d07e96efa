-- forget_stored.lua: removes what was counted of an account's log and bodies, if both have expired.
--
-- An event that is queued meanwhile is counted: it comes either before this, and then one of them exists, or after it.
--
-- KEYS[1]  stream  the account's log
-- KEYS[2]  hash    the bodies of its events
-- KEYS[3]  zset    account -> bytes
-- ARGV     account
--
-- Returns  1 | 0 if one of them exists

if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return 0 end
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
