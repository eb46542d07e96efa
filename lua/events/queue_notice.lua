-- queue_notice.lua: queues a notice for each e-mail address of the account that wants this kind, or for one address.
--
-- A notice with the same subject is queued once, whichever processes call this and however often. A second one follows
-- only if its level is higher: a full cap after one that is nearly full, a recovery after its outage. Without an
-- address that wants it, a notice leaves no mark, so that one that is turned on meanwhile gets the next.
--
-- KEYS[1]  hash    the account's notices: hash of an address -> {address, kinds}, JSON
-- KEYS[2]  stream  the partition's notices to send
-- KEYS[3]  string  mark: the level of the last notice with this subject
-- KEYS[4]  zset    accounts that are being deleted: they get none
-- ARGV     account, kind, level, lifetime of the mark (seconds), type, app (name, or ''), data (JSON), hash of the only
--          address ('' for those that want the kind)
--
-- Returns  the number of addresses, or -1 if the stream is full

local MAX_WAITING = 10000  -- notices of one partition

local notices, stream, mark, deletions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local account, kind, level, lifetime, only = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[8]

local addresses = {}
if only ~= '' then addresses[1] = only end
for n, value in ipairs(only == '' and redis.call('HGETALL', notices) or {}) do
  if n % 2 == 1 then
    addresses[#addresses + 1] = value
  else
    local wanted = false
    for _, each in ipairs(cjson.decode(value).kinds) do wanted = wanted or each == kind end
    if not wanted then addresses[#addresses] = nil end
  end
end
if #addresses == 0 or redis.call('ZSCORE', deletions, account) then return 0 end
if tonumber(redis.call('GET', mark) or 0) >= level then return 0 end
if redis.call('XLEN', stream) + #addresses > MAX_WAITING then return -1 end
redis.call('SET', mark, level, 'EX', lifetime)
for _, address in ipairs(addresses) do
  redis.call('XADD', stream, '*', 'account', account, 'address', address, 'kind', kind, 'type', ARGV[5], 'app', ARGV[6],
    'data', ARGV[7])
end
return #addresses
