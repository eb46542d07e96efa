-- claim_notice.lua: confirms that a worker may send a notice now, and returns who gets it.
--
-- As in claim_delivery.lua, only the consumer for which the entry is pending may send it, and its idle time restarts.
-- An address that wants no notices any more, or whose person has left the account or may only read it, does not get it.
-- Neither does anyone while the account is being deleted. An invitation is for the address as long as it is invited.
--
-- KEYS[1]  stream  the partition's notices to send
-- KEYS[2]  hash    the account's notices: hash of an address -> {address, kinds}, JSON
-- KEYS[3]  zset    accounts that are being deleted
-- KEYS[4]  string  the account's members: {members: {address: {role}}}, JSON
-- KEYS[5]  string  the account's invitations: {hash of an address: {email}}, JSON
-- ARGV     group, consumer, entry, account, hash of the address, kind, then the roles that get notices
--
-- Returns  {1, {address, kinds} as JSON, or ''} | {0, ''}

local stream, notices, deletions, members, invitations = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local group, consumer, entry, account, address, kind = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

if #redis.call('XPENDING', stream, group, entry, entry, 1, consumer) == 0 then return {0, ''} end
redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
if redis.call('ZSCORE', deletions, account) then return {1, ''} end
if kind == 'invitation' then
  local invitation = cjson.decode(redis.call('GET', invitations) or '{}')[address]
  return {1, invitation and cjson.encode({address = invitation.email, kinds = {kind}}) or ''}
end
local subscriber, record = redis.call('HGET', notices, address), redis.call('GET', members)
if not subscriber or not record then return {1, ''} end
local member = cjson.decode(record).members[cjson.decode(subscriber).address]
for n = 7, #ARGV do
  if member and member.role == ARGV[n] then return {1, subscriber} end
end
return {1, ''}
