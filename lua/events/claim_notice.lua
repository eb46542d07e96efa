-- claim_notice.lua: confirms that a worker may send a notice now, and returns who gets it.
--
-- As in claim_delivery.lua, only the consumer for which the entry is pending may send it, and its idle time restarts.
-- An address that has ended this kind of notice since, or whose account is being deleted, does not get it.
--
-- KEYS[1]  stream  the partition's notices to send
-- KEYS[2]  hash    the account's notices: hash of an address -> {address, kinds}, JSON
-- KEYS[3]  zset    accounts that are being deleted
-- ARGV     group, consumer, entry, account, hash of the address
--
-- Returns  {1, {address, kinds} as JSON, or ''} | {0, ''}

local stream, notices, deletions = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, entry, account, address = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if #redis.call('XPENDING', stream, group, entry, entry, 1, consumer) == 0 then return {0, ''} end
redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
if redis.call('ZSCORE', deletions, account) then return {1, ''} end
return {1, redis.call('HGET', notices, address) or ''}
