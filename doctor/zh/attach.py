"""The sentences of attach/: of a job that runs or hangs now."""

SENTENCES = {
    # ---- words.py: ranks, and what they do
    "rank {rank}": "rank {rank}",
    "ranks {ranks}": "rank {ranks}",
    "ranks {first} to {last}": "rank {first} 到 {last}",
    "{ranks} waits": "{ranks} 在等",
    "{ranks} wait": "{ranks} 在等",
    "{ranks} works": "{ranks} 还在工作",
    "{ranks} work": "{ranks} 还在工作",
    "{ranks} reads": "{ranks} 在读",
    "{ranks} read": "{ranks} 在读",
    "{ranks} has": "{ranks}",
    "{ranks} have": "{ranks}",
    "{ranks} is": "{ranks}",
    "{ranks} are": "{ranks}",
    "{ranks} computes": "{ranks} 在计算",
    "{ranks} compute": "{ranks} 在计算",
    "{ranks} is ({line})": "{ranks} 在 {line}",
    "{ranks} are ({line})": "{ranks} 在 {line}",
    "{ranks} in {call} ({line})": "{ranks} 停在 {call}（{line}）",
    # ---- command.py, sight.py, slurm.py
    "it needs py-spy: {command}": "需要 py-spy：{command}",
    "written: {file}. Join those of all machines: {command}": (
        "已经写入 {file}。把所有节点的文件合起来看：{command}"
    ),
    "no rank is found\n{count} Python processes ({pids}) belong to others, or are closed:\n "
    "{remedy}": "没有找到 rank\n有 {count} 个 Python 进程（{pids}）属于别的用户，或者不让读：\n {remedy}",
    "no rank runs on this machine: give the id of a process": (
        "这台机器上没有 rank 在运行：请给出一个进程的编号"
    ),
    "it finds processes in /proc, which only Linux has": "它靠 /proc 查找进程，而 /proc 只有 Linux 才有",
    "no process {pid}": "没有进程 {pid}",
    "{pid} is no Python process, and has started no rank": (
        "{pid} 不是 Python 进程，也没有启动过任何 rank"
    ),
    "{file} was not written by doctor --attach --out": "{file} 不是 doctor --attach --out 写的",
    "no node of job {job} has answered": "Slurm 作业 {job} 的节点都没有回应",
    # ---- tell.py
    "{count} ranks of: {command}, in {folder}; looked at for {seconds:.0f} s": (
        "{count} 个 rank，命令：{command}，目录：{folder}；看了 {seconds:.0f} 秒"
    ),
    "1 rank of: {command}, in {folder}; looked at for {seconds:.0f} s": (
        "1 个 rank，命令：{command}，目录：{folder}；看了 {seconds:.0f} 秒"
    ),
    "why it came so is seen from the start: {command}, in a copy of the folder": (
        "为什么会这样，要从头看：把目录复制一份，在里面运行 {command}"
    ),
    "{name} is neither a process nor a file of --out": "{name} 既不是进程号，也不是 --out 写的文件",
    "these processes are of several jobs: give those of one": (
        "这些进程属于不同的任务：请只给同一个任务的"
    ),
    "works": "还在工作",
    "work": "还在工作",
    "stands": "停住",
    "stand": "停住",
    "{does}, {line} {function}": "{does}，{line} {function}",
    "{does} in {call}, {line} {function}": "{does}（{call}），{line} {function}",
    "has ended between the looks": "在两次查看之间结束了",
    "stopped by a signal": "被信号暂停",
    "could not be read": "读不到调用栈",
    "no such process: it has ended, or was killed": "没有这个进程：已经结束，或者被杀掉",
    "not on this machine, or gone": "不在这台机器上，或者已经没了",
    "py-spy could not read a process: {error}": "py-spy 读不了某个进程：{error}",
    "a process may not be read by another (ptrace). Either:": (
        "系统不让读别的进程（ptrace）。可以任选一种办法："
    ),
    "- start the container with it: {command}": "- 启动容器时加上这个权限：{command}",
    "  in Kubernetes securityContext: {setting}": "  在 Kubernetes 的 securityContext 里：{setting}",
    "- or look from outside of it, as root": "- 或者在容器外面，用 root 查看",
    "- as root: {command}": "- 用 root：{command}",
    "- allow it until the next start: {command}": "- 允许到下次重启为止：{command}",
    "several jobs run here: give a process of one": (
        "这里有几个任务：请给出要看的那个任务里一个进程的编号"
    ),
    "  {ranks}, pids {pids}, since {time}: {command}, in {folder}": (
        "  {ranks}，进程 {pids}，{time} 启动：{command}，目录：{folder}"
    ),
    # ---- states.py
    "{ranks} could not be read": "读不到 {ranks} 的调用栈",
    "{text}; {they_wait}, perhaps for it: {where}": "{text}；{they_wait}，等的也许就是它：{where}",
    "{they_are} stopped, by SIGSTOP or a debugger: `kill -CONT {pids}`": (
        "{they_are} 被 SIGSTOP 或者调试器暂停了，用 `kill -CONT {pids}` 继续"
    ),
    "{they_are} gone, ended or killed: {others_wait} in vain. Look at the end of its output; "
    "without an error there, `dmesg` says whether the kernel killed it for memory": (
        "{they_are} 没了（已经结束，或者被杀掉）：{others_wait}，但等不到。请看没了的 rank 最后的输出；如果没有报错，用 `dmesg` 看是不是内存不足，被内核杀掉了"
    ),
    "{they_wait} for your words in the debugger, and the others for it": (
        "{they_wait}你在调试器里输入命令，其他 rank 在等它"
    ),
    "{ranks} moved or computed between the looks: it does not hang": (
        "几次查看之间，{ranks} 还在动，或者还在计算：没有卡死"
    ),
    "{they_wait} in init_process_group, and {others}: not all come to it": (
        "{they_wait}其他 rank 调用 init_process_group，而 {others}：不是所有 rank 都会走到那里"
    ),
    "all {here} ranks that are here wait in init_process_group for {size} ranks: are all started, "
    "with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?": (
        "这里的 {here} 个 rank 都停在 init_process_group，等 {size} 个 rank 到齐：都启动了吗？"
        "MASTER_ADDR、MASTER_PORT 和 WORLD_SIZE 都一样吗？"
    ),
    "{they_wait} for data at {line}": "{they_wait}数据（{line}）",
    "{text}; its worker {pid} stands at {line}": "{text}；它的 worker（进程 {pid}）停在 {line}",
    "{text}; its worker {pid} is at {line}": "{text}；它的 worker（进程 {pid}）在 {line}",
    "{text}; no worker was found among its processes ({count})": (
        "{text}；在它的 {count} 个 Python 子进程里没有找到 worker"
    ),
    "{text}: its workers still start": "{text}：worker 还在启动",
    "{text}: its workers compute, a slow loader": "{text}：worker 还在计算，是 DataLoader 太慢",
    "{they_compute} at {line}, or a GPU does: no hang by now. Look again, with --seconds "
    "60": "{they_compute}（{line}），也可能在等 GPU：目前没有卡死。请用 --seconds 60 再看一次",
    "{text}, waiting for a disk": "{text}（在等磁盘）",
    "{text} `{code}`": "{text} `{code}`",
    "{text}; it has no worker that lives": "{text}；它的 worker 一个都不在了",
    "{text}; {they_wait} for it": "{text}；{they_wait}它",
    "{they_work} (last seen at {line}), {others_wait} for it: no hang by now. Look again, with "
    "--seconds 60": (
        "{they_work}（最后一次看到时在 {line}），{others_wait}它：目前没有卡死。请用 --seconds 60 再看一次"
    ),
    "{they_work} (last seen at {line}): no hang by now": (
        "{they_work}（最后一次看到时在 {line}）：目前没有卡死"
    ),
    "{they_work} (last seen at {line}), and {others}: no hang by now": (
        "{they_work}（最后一次看到时在 {line}），{others}：目前没有卡死"
    ),
    "{text}, {ranks} under `{condition}`": "{text}。{ranks} 在 `{condition}` 下面",
    "{they_read} data in most looks ({line}), {others_wait}: a slow loader": (
        "几次查看里，多数时候 {they_read}数据（{line}），{others_wait}：DataLoader 太慢"
    ),
    # ---- waits.py
    "all ranks must call each new_group(), in one order, also those that are not in the group: is "
    "one before this made by some alone? {where}": (
        "每个 new_group() 都要所有 rank 按同样的顺序调用，不在组里的也一样：之前是不是有一个只有"
        "部分 rank 调用了？{where}"
    ),
    "{ranks} alone calls {call}: it stands under `{condition}`, which the others do not enter; "
    "{others}": "只有 {ranks} 调用 {call}：这一行在 `{condition}` 下面，其他 rank 不会进入；{others}",
    "{ranks} calls DDP's model without gradients: it sends its buffers to the others, which do "
    "not call it: {others}. Call the plain model there": (
        "{ranks} 在不求梯度时调用了包装后的模型（DDP）：它会把 buffer 发给其他 rank，而其他 rank 没有调用它：{others}。这里应该调用未包装的模型"
    ),
    "{they_have} ended its training, and {others}": "{they_have} 已经结束训练，而 {others}",
    "`{code}` (line {line})": "`{code}`（第 {line} 行）",
    "{they_wait} in backward for gradients that do not come: {others}. {more}": (
        "{they_wait}其他 rank 在 backward 里的梯度，但等不到：{others}。{more}"
    ),
    "A backward was left out: a batch skipped on one rank alone?": (
        "少了一次 backward：是不是只有一个 rank 跳过了某个 batch？"
    ),
    "A backward was left out: a batch skipped on one rank alone, at {line}?": (
        "少了一次 backward：是不是只有一个 rank 在这里跳过了某个 batch：{line}？"
    ),
    "{they_are} past the training loop, or elsewhere: a batch less?": (
        "{they_are} 已经出了训练循环，或者在别处：是不是少了一个 batch？"
    ),
    "{they_are} past the training loop, or elsewhere: a batch less, or one skipped at {line}?": (
        "{they_are} 已经出了训练循环，或者在别处：是不是少了一个 batch，或者在这里跳过了一个：{line}？"
    ),
    "{they_wait} in {call} for {ranks}, seen at {line}": (
        "{they_wait}，停在 {call}；等的是 {ranks}，后者在 {line}"
    ),
    "{they_wait} in {call} for {ranks}, seen in {other} at {line}": (
        "{they_wait}，停在 {call}；等的是 {ranks}，后者停在 {other}，在 {line}"
    ),
    "{text}, where nothing is computed": "{text}，没有在计算",
    "{they_wait} in {call} for {ranks}, which is past this loop, `{loop}` (line {first}): a batch "
    "less? It stands in `{polls}` (line {second}): what this asks for does not come, if it is done "
    "after the loop": (
        "{they_wait}，停在 {call}；等的是 {ranks}，后者已经走出了这个循环：`{loop}`（第 {first} 行），"
        "是不是少一个 batch？它停在 `{polls}`（第 {second} 行）：如果所等的东西要在前一个循环之后才产生，就永远等不到"
    ),
    "no rank answers: {where}. Each send needs its recv, and of two ranks one must send first, "
    "the other receive": (
        "没有 rank 回应：{where}。每个 send 都要有对应的 recv；两个 rank 之间，要一个先发，另一个先收"
    ),
    "the ranks do not make the same calls: {where}. {more}": "各 rank 的调用不一致：{where}。{more}",
    "{line} is reached under `{condition}`: is that the same in all?": (
        "{line} 在 `{condition}` 下面：这个条件在所有 rank 上都一样吗？"
    ),
    "Which of these lines does a rank reach that another does not, or earlier?": (
        "这些行里，哪一行是有的 rank 会走到、有的不会，或者有的走到得更早？"
    ),
    "{where}: on GPUs they compute, or stand. Look again, with --seconds 60": (
        "{where}：GPU 可能在计算，也可能停住了。请用 --seconds 60 再看一次"
    ),
    "all ranks wait in {call} at {line}: each for a message that none sends": (
        "所有 rank 都停在 {call}（{line}）：每个都在等一条谁也没有发的消息"
    ),
    "all ranks wait in {call} at {line}: their tensors differ in size, one has made more calls "
    "before (the flight recorder tells: --dumps), or the network fails": (
        "所有 rank 都停在 {call}（{line}）：可能是张量大小不一致，或者某个 rank 之前多调用了几次（flight recorder 能看出来：--dumps），或者网络出了问题"
    ),
    "all that are here wait: {where}; for {ranks}, on another machine or gone: look there with "
    "--out, and join the files": (
        "这里的 rank 都在等：{where}；等的是 {ranks}，在别的节点上，或者已经没了：在那个节点上用 --out 查看，再把文件合起来看"
    ),
    "{where}: in no call that is known to wait for another rank": (
        "{where}：停住了，不在任何已知会等待其他 rank 的调用里"
    ),
    "no rank answers: {where}. Each send needs its recv, and a collective is called by all, in one "
    "order (the flight recorder tells: --dumps)": (
        "没有 rank 回应：{where}。每个 send 都要有对应的 recv；集合通信要所有 rank 按同样的顺序调用（flight recorder 能看出来：--dumps）"
    ),
    "it waits in {call} at {line}; its other ranks were not found": (
        "它停在 {call}（{line}），在等其他 rank；没有找到它的其他 rank"
    ),
}
