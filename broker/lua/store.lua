-- The ledger in Redis, part 1: keys, scalars and answers. The parts are joined into one script (redis_backend.py),
-- so every call is atomic. KEYS[1]: namespace. ARGV: call, time in seconds or '' for the server's, msgpack, payloads.

local call, args, payload = ARGV[1], cmsgpack.unpack(ARGV[3]), 4
local woken = {} -- kinds of waits that may be over, see wakes.lua

local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function key(name)
  return KEYS[1] .. ':' .. name
end

local function redis_at(command, name, ...)
  return redis.call(command, key(name), ...)
end

-- Scalars: version, incarnation, revision, serial, fed, durable, base, each of the rules, … read once per call.
local scalars = {}
do
  local flat = redis_at('HGETALL', 'scalars')
  for i = 1, #flat, 2 do
    scalars[flat[i]] = flat[i + 1]
  end
end

local function put(name, value)
  scalars[name] = tostring(value)
  redis_at('HSET', 'scalars', name, scalars[name])
end

local function number(name, default)
  return tonumber(scalars[name] or default)
end

local function add(name, amount)
  put(name, number(name, 0) + amount)
  return number(name)
end

local function news()
  add('revision', 1)
  woken.news = true
end

local function event(name, amount)
  if amount > 0 then
    redis_at('HINCRBY', 'events', name, amount)
  end
end

local function is_open()
  return scalars.token ~= nil
end

local function is_finished()
  return (scalars.finished or '') ~= ''
end

-- Must stay equal to tally() of broker/reasons.py.
local function tally(reason)
  if redis_at('HEXISTS', 'dead', reason) == 0 and redis_at('HLEN', 'dead') >= 32 then
    reason = 'other'
  end
  redis_at('HINCRBY', 'dead', reason, 1)
  return reason
end

-- Must stay equal to untally() of broker/reasons.py.
local function untally(name)
  if redis_at('HINCRBY', 'dead', name, -1) == 0 then
    redis_at('HDEL', 'dead', name)
  end
end

-- Items are named by their position: "17" in training, "eval<version>.17" in evaluation.
local function position(item)
  return tonumber(string.match(item, '%d+$'))
end

local function is_eval(item)
  return string.sub(item, 1, 4) == 'eval'
end

local function each(name, visit)
  local flat = redis_at('HGETALL', name)
  for i = 1, #flat, 2 do
    visit(flat[i], cmsgpack.unpack(flat[i + 1]))
  end
end

local function ok(value, ...)
  return { 'ok', cmsgpack.pack(value), ... }
end

local function refused(text)
  return { 'refused', text }
end
