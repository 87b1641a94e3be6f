-- Part 4: the calls (broker/ledger.py). Every one answers {status, …}; what is refused has changed nothing.

local calls, needs_open_run = {}, {}

function calls.OpenRun()
  if scalars.token == args.token then
    return ok(number('incarnation'))
  end
  for name, value in pairs(args.rules) do
    put(name, value)
  end
  put('rules', ARGV[payload])
  put('token', args.token)
  redis_at('RPUSH', 'forks', args.version)
  queue_undone(args.version)
  if args.version < number('durable_version', -1) then
    restart_at(args.base, args.beyond)
  else
    extend_to(args.base, args.beyond)
  end
  put('durable_version', args.version)
  for _, name in ipairs({ 'prompts', 'queue', 'failed', 'grants', 'ends', 'answers' }) do
    redis_at('DEL', 'eval:' .. name)
  end
  put('round', -1)
  put('version', args.version)
  put('incarnation', number('incarnation', -1) + 1)
  put('finished', '')
  news()
  return ok(number('incarnation'))
end

local function feed_eval(item, prompt)
  local known = redis_at('HEXISTS', 'eval:prompts', item) == 1 or redis_at('HEXISTS', 'eval:answers', item) == 1
  if not known then
    redis_at('HSET', 'eval:prompts', item, prompt)
    queue('eval', item)
  end
  return not known
end

local function feed_train(item, prompt)
  local live = redis_at('HEXISTS', 'train:prompts', item) == 1 or redis_at('HEXISTS', 'ended', item) == 1
  local known = live or is_durable(item)
  if not known then
    redis_at('HSET', 'train:prompts', item, prompt)
    queue('train', item)
    add('fed', 1)
  end
  return not known
end

needs_open_run.Feed = true
function calls.Feed()
  if args.round and args.round ~= number('round') then
    for _, name in ipairs({ 'prompts', 'queue', 'failed', 'grants', 'ends', 'answers' }) do
      redis_at('DEL', 'eval:' .. name)
    end
    put('round', args.round)
  end
  local added = 0
  for i, item in ipairs(args.items) do
    local feed = args.evaluation[i] and feed_eval or feed_train
    if feed(item, ARGV[payload + i - 1]) then
      added = added + 1
    end
  end
  changed = changed or added > 0
  return ok(added)
end

needs_open_run.TakeBatch = true
function calls.TakeBatch()
  if is_finished() then
    return { 'finished', scalars.finished }
  end
  local taken = redis_at('HGET', 'batches', args.version)
  if taken then
    return { 'ok', taken }
  end
  local out = redis_at('HLEN', 'batches')
  local due = number('version') + out
  if args.version ~= due then
    local text = 'a batch for version %d was asked for; the learner is at %d with %d batches out, so the next is for %d'
    return refused(string.format(text, args.version, number('version'), out, due))
  end
  local ready = ready_groups(args.version)
  if #ready < number('groups_per_step') then
    return args.last and ok(false) or wait()
  end
  return ok(assemble(args.version, ready))
end

needs_open_run.Trained = true
function calls.Trained()
  local named = args.batch_id == scalars.incarnation .. '.' .. (args.version - 1)
  if named and args.version <= number('version') then
    return ok(false)
  end
  local taken = redis_at('HGET', 'batches', args.version - 1)
  if not named or args.version ~= number('version') + 1 or not taken then
    local text = 'batch %s cannot become version %d: the learner of incarnation %s is at version %s, %d batches out'
    local out = redis_at('HLEN', 'batches')
    return refused(string.format(text, args.batch_id, args.version, scalars.incarnation, scalars.version, out))
  end
  for _, item in ipairs(cmsgpack.unpack(taken).items) do
    redis_at('HDEL', 'groups', item)
    redis_at('ZADD', 'trained', args.version, item)
  end
  redis_at('HDEL', 'batches', args.version - 1)
  put('version', args.version)
  news()
  return ok(false)
end

needs_open_run.Durable = true
function calls.Durable()
  if args.version > number('version') then
    local text = 'version %d cannot be durable: the learner is at version %s'
    return refused(string.format(text, args.version, scalars.version))
  end
  local positions = {}
  for _, item in ipairs(redis_at('ZRANGEBYSCORE', 'trained', '-inf', args.version)) do
    forget('train', item)
    redis_at('ZREM', 'trained', item)
    table.insert(positions, position(item))
  end
  add('durable', #positions)
  each('ended', function(item, one)
    if one.version and one.version <= args.version then
      redis_at('HDEL', 'ended', item)
      table.insert(positions, position(item))
    end
  end)
  extend_frontier(number('base', 0), positions)
  put('durable_version', math.max(number('durable_version', -1), args.version))
  return ok(false)
end

needs_open_run.EvalResults = true
function calls.EvalResults()
  local items = args.version == number('round') and redis_at('HKEYS', 'eval:answers') or {}
  if #items < args.count and not args.last and not is_finished() then
    return wait()
  end
  return ok(items)
end

needs_open_run.Publish = true
function calls.Publish()
  if ARGV[payload] == scalars.publication then
    return ok(false)
  end
  if args.incarnation ~= number('incarnation') then
    local text = 'incarnation %d publishes, but %s is open'
    return refused(string.format(text, args.incarnation, scalars.incarnation))
  end
  if args.attempt <= number('published_attempt', args.attempt - 1) then
    local text = 'publication attempt %d is not above %s: attempts are numbered over the whole run'
    return refused(string.format(text, args.attempt, scalars.published_attempt))
  end
  put('publication', ARGV[payload])
  put('published_attempt', args.attempt)
  put('published_incarnation', args.incarnation)
  changed = true
  return ok(false)
end

function calls.Finish()
  if not is_finished() then
    put('finished', args.reason ~= '' and args.reason or 'finished')
    news()
  end
  return ok(false)
end

-- What this very call was given before its connection broke: a call sent again must not lease twice.
local function leased_before()
  local packed = redis_at('GET', 'leased:' .. args.member_id)
  local before = packed and cmsgpack.unpack(packed)
  return before and before.token == args.token and before
end

function calls.LeasePrompts()
  if is_finished() then
    return { 'finished', scalars.finished }
  end
  local given = leased_before() or { token = args.token, leases = {}, prompts = {} }
  local welcome = is_open() and args.incarnation == number('incarnation') and #given.leases == 0
  while welcome and #given.leases < args.max_prompts do
    local pool = nil
    if args.policy_version == number('round') and redis_at('ZCARD', 'eval:queue') > 0 then
      pool = 'eval'
    elseif redis_at('ZCARD', 'train:queue') > 0 and admitted(args.policy_version) then
      pool = 'train'
    else
      break
    end
    local lease, prompt = grant(pool)
    table.insert(given.leases, lease)
    table.insert(given.prompts, prompt)
  end
  if #given.leases == 0 then
    return args.last and ok({}) or wait()
  end
  redis_at('SET', 'leased:' .. args.member_id, cmsgpack.pack(given), 'PX', 120000)
  return ok(given.leases, unpack(given.prompts))
end

local function push(pool)
  local entry = grant_of(pool, args.lease_id)
  if not entry then
    return pool == 'train' and abandoned(args.tokens, args.incarnation) and 'abandoned' or 'duplicate'
  end
  if entry.item ~= args.item then
    return nil, string.format('lease %s is for item %s, not for %s', args.lease_id, entry.item, args.item)
  end
  drop_grant(pool, args.lease_id)
  if pool == 'eval' then
    forget(pool, args.item)
    redis_at('HSET', 'eval:answers', args.item, ARGV[payload])
    return 'accepted'
  end
  local incarnation = math.min(args.incarnation, entry.incarnation)
  if abandoned(args.tokens, incarnation) then
    queue(pool, args.item)
    return 'abandoned'
  end
  local held = { tokens = args.tokens, incarnation = incarnation, arrival = add('serial', 1), size = args.size }
  redis_at('HSET', 'buffer', args.item, cmsgpack.pack(held))
  redis_at('HSET', 'groups', args.item, ARGV[payload])
  return 'accepted'
end

function calls.Push()
  local outcome, problem = 'abandoned', nil
  if not args.evaluation or args.incarnation == number('incarnation', -1) then
    outcome, problem = push(args.evaluation and 'eval' or 'train')
  end
  if problem then
    return refused(problem)
  end
  if outcome ~= 'accepted' then
    event(outcome, 1)
  end
  changed = true
  return ok(outcome)
end

function calls.Release()
  for _, pool in ipairs({ 'train', 'eval' }) do
    if grant_of(pool, args.lease_id) then
      event(args.error ~= '' and 'failed' or 'released', 1)
      give_back(pool, args.lease_id, args.error)
    end
  end
  return ok(false)
end
