-- Part 6: members and looking, and the end of the script: one call, then notices to those whose wait may be over.

local function same(a, b)
  return a.state == b.state and a.version == b.version and a.incarnation == b.incarnation and a.error == b.error
end

-- Whether a newer process has taken this one's id; else its own taking is noted (broker/roster.py).
local function replaced_life(member_id, before, life)
  if not before or cmsgpack.unpack(before).life == life then
    return false
  end
  local packed = redis_at('HGET', 'replaced', member_id)
  local replaced = packed and cmsgpack.unpack(packed) or {}
  for _, one in ipairs(replaced) do
    if one == life then
      return true
    end
  end
  table.insert(replaced, cmsgpack.unpack(before).life)
  if #replaced > 4 then
    table.remove(replaced, 1)
  end
  redis_at('HSET', 'replaced', member_id, cmsgpack.pack(replaced))
  return false
end

function calls.Report()
  local member_id, shown = args.member_id, args.shown
  local before = redis_at('HGET', 'shown', member_id)
  if replaced_life(member_id, before, shown.life) then
    local text = 'another process has joined as %s since: give every generator an --id of its own'
    return refused(string.format(text, member_id))
  end
  local leaves_quietly = shown.state == 'gone' and shown.error == ''
  for _, name in ipairs({ 'members', 'shown' }) do
    redis_at('HDEL', name, member_id)
  end
  redis_at('ZREM', 'seen', member_id)
  redis_at('ZREM', 'gone', member_id)
  if not leaves_quietly then
    redis_at('HSET', 'members', member_id, ARGV[payload])
  else
    redis_at('HDEL', 'replaced', member_id)
  end
  if shown.state ~= 'gone' then
    redis_at('HSET', 'shown', member_id, cmsgpack.pack(shown))
    redis_at('ZADD', 'seen', now, member_id)
  elseif not leaves_quietly then
    keep_gone(member_id, shown)
  end
  if leaves_quietly and before or not leaves_quietly and not (before and same(cmsgpack.unpack(before), shown)) then
    news()
  end
  for _, pool in ipairs({ 'train', 'eval' }) do
    if shown.state == 'gone' then
      give_back_all(pool, member_id, args.error)
    elseif is_open() then
      for _, lease_id in ipairs(args.leases) do
        renew(pool, lease_id, member_id)
      end
    end
  end
  return ok(false)
end

function calls.ReadPublication()
  local attempt = number('published_attempt', -1)
  local current = scalars.published_attempt and scalars.published_incarnation == scalars.incarnation
  if current and attempt > args.after_attempt then
    return ok(true, redis_at('GET', 'publication'))
  end
  return (args.last or is_finished()) and ok(false) or wait()
end

local function hash_of(name, convert)
  local flat, result = redis_at('HGETALL', name), {}
  for i = 1, #flat, 2 do
    table.insert(result, { flat[i], convert(flat[i + 1]) })
  end
  return result
end

function calls.ReadState()
  if number('revision', 0) <= args.after_revision and not args.last then
    return wait()
  end
  local state = {
    revision = number('revision', 0),
    incarnation = number('incarnation', -1),
    version = number('version', -1),
    finished = scalars.finished or '',
    fed = number('fed', 0),
    queued = redis_at('ZCARD', 'train:queue'),
    leased = redis_at('HLEN', 'train:grants'),
    buffered = redis_at('SCARD', 'buffer'),
    training = redis_at('HLEN', 'held') - redis_at('SCARD', 'buffer'),
    trained = redis_at('ZCARD', 'trained') + number('unsaved', 0),
    durable = number('durable', 0) - number('unsaved', 0),
    dead = hash_of('dead', tonumber),
    events = hash_of('events', tonumber),
    buffered_bytes = number('held_bytes', 0),
    shown = hash_of('shown', cmsgpack.unpack),
    silent_s = {}, -- since a member's last report
    batches = redis_at('HLEN', 'batches'),
  }
  local seen = redis_at('ZRANGE', 'seen', 0, -1, 'WITHSCORES')
  for i = 1, #seen, 2 do
    state.silent_s[seen[i]] = now - tonumber(seen[i + 1])
  end
  local members = {} -- packed as one: there may be more than a call can return one by one
  for _, pair in ipairs(state.shown) do
    table.insert(members, redis_at('HGET', 'members', pair[1]))
  end
  return ok(state, redis_at('GET', 'rules') or '', redis_at('GET', 'publication') or '', cmsgpack.pack(members))
end

expire()
local answer = nil
if needs_open_run[call] and not is_open() then
  answer = { 'no_open_run', 'the broker knows of no open run; a learner opens it' }
else
  answer = calls[call]()
end
notify()
return answer
