-- turns.lua: which waiting account is next, over all processes. Not a script of its own; see deliveries.lua.
--
-- The order of gateway/inference/fair_queue.py, a virtual counter per account: a served request raises it by
-- COST / weight, and the lowest is next. A score in `turns` is the counter times TIES plus a running number, so that of
-- equal counters the account that reached it first is next. Within an account its processes are served in turn.
--
--   waiting  hash  account -> `<weight> <process>=<waiting requests> …`, the next process first
--   turns    zset  the accounts that wait, by their counter
--   past     zset  accounts that waited before, by their counter, until nobody waits

local COST = 5040   -- divisible by the weights 1 to 10
local TIES = 16384  -- more than accounts can wait

local turns = {}

function turns.open(waiting, ranks, past, number)
  turns.waiting, turns.ranks, turns.past, turns.number = waiting, ranks, past, number
end

local function parse(record)
  local weight, rest = string.match(record, '^(%S+)(.*)$')
  local processes = {}
  for process, count in string.gmatch(rest or '', '(%S+)=(%d+)') do
    processes[#processes + 1] = {process, tonumber(count)}
  end
  return weight, processes
end

local function read_waiting(account) return parse(redis.call('HGET', turns.waiting, account) or '') end

local function rank(account, counter)
  turns.number = (turns.number + 1) % TIES
  redis.call('ZADD', turns.ranks, string.format('%.0f', counter * TIES + turns.number), account)
end

local function lowest()
  local first = redis.call('ZRANGE', turns.ranks, 0, 0, 'WITHSCORES')
  if not first[1] then return nil, 0 end
  return first[1], math.floor(tonumber(first[2]) / TIES)
end

local function write_waiting(account, weight, processes, counter)
  if #processes > 0 then
    local parts = {weight}
    for _, each in ipairs(processes) do parts[#parts + 1] = each[1] .. '=' .. string.format('%.0f', each[2]) end
    redis.call('HSET', turns.waiting, account, table.concat(parts, ' '))
    if counter then rank(account, counter) end
    return
  end
  local score = redis.call('ZSCORE', turns.ranks, account)
  if not score then return end
  redis.call('HDEL', turns.waiting, account)
  redis.call('ZREM', turns.ranks, account)
  redis.call('ZADD', turns.past, string.format('%.0f', counter or math.floor(tonumber(score) / TIES)), account)
  local first, least = lowest()
  if first then
    -- A counter that is not above the lowest gives no account less than it would start with.
    redis.call('ZREMRANGEBYSCORE', turns.past, '-inf', string.format('%.0f', least))
  else
    redis.call('DEL', turns.past)
  end
end

-- `count` of the account's requests wait in this process.
function turns.set(account, weight, process, count)
  local _, processes = read_waiting(account)
  local counter, place = nil, #processes + 1
  if #processes == 0 and count > 0 then
    local _, least = lowest()
    counter = math.max(least, tonumber(redis.call('ZSCORE', turns.past, account) or 0))
    redis.call('ZREM', turns.past, account)
  end
  for n, each in ipairs(processes) do
    if each[1] == process then place = n end
  end
  if count > 0 then
    processes[place] = {process, count}
  elseif place <= #processes then
    table.remove(processes, place)
  end
  write_waiting(account, weight, processes, counter)
end

-- How many of the account's requests wait in other processes.
function turns.elsewhere(account, process)
  local _, processes = read_waiting(account)
  local count = 0
  for _, each in ipairs(processes) do
    if each[1] ~= process then count = count + each[2] end
  end
  return count
end

-- Nothing waits in these processes any more. One pass over all accounts: it is rare.
function turns.forget(gone)
  local records = redis.call('HGETALL', turns.waiting)
  for n = 1, #records, 2 do
    local weight, processes = parse(records[n + 1])
    local left = {}
    for _, each in ipairs(processes) do
      if not gone[each[1]] then left[#left + 1] = each end
    end
    if #left < #processes then write_waiting(records[n], weight, left, nil) end
  end
end

-- Takes the next turn: the account and the process that has the request, or nil when nobody waits.
function turns.take()
  local account, counter = lowest()
  if not account then return nil end
  local weight, processes = read_waiting(account)
  local each = table.remove(processes, 1)
  if each[2] > 1 then processes[#processes + 1] = {each[1], each[2] - 1} end
  write_waiting(account, weight, processes, counter + math.max(1, math.floor(COST / tonumber(weight) + 0.5)))
  return account, each[1]
end

function turns.count() return redis.call('ZCARD', turns.ranks) end
