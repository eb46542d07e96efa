-- forget_stored_bytes.lua: removes the byte count of an account's log and bodies, if both have expired.
--
-- An event that is queued meanwhile stays counted: it comes either before this script, and then one of them exists, or
-- after it.
--
-- KEYS[1]  stream  the account's log
-- KEYS[2]  hash    the bodies of its events
-- KEYS[3]  zset    account -> bytes
-- ARGV     account
--
-- Returns  1 | 0 if the log or the bodies exist

local log, bodies, stored = KEYS[1], KEYS[2], KEYS[3]
local account = ARGV[1]

if redis.call('EXISTS', log, bodies) > 0 then return 0 end
redis.call('ZREM', stored, account)
return 1
