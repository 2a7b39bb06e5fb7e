"""The words of the figures in Chinese: by the English text, its lines joined by blanks."""

# ruff: noqa: RUF001

CHINESE = {
    # dataparallel
    "DataParallel: in every step GPU 0 sends the model out and takes gradients in": (
        "DataParallel：每个 step，GPU 0 发出模型，收回梯度"
    ),
    "1  scatter and replicate": "1  切分数据，复制模型",
    "2  forward and gather": "2  前向，汇总输出",
    "3  backward and step": "3  反向，更新参数",
    "GPU 0 sends each GPU its images and a whole model": (
        "GPU 0 给每张卡发一份图片和一个完整的模型"
    ),
    "the scores go to GPU 0, which computes the loss": "输出汇总到 GPU 0，在那里计算 loss",
    "gradients are added on GPU 0; the copies are thrown away": (
        "梯度在 GPU 0 上求和；各卡上的副本丢弃"
    ),
    "model": "模型",
    "optimizer": "优化器",
    "batch": "batch",
    "scores": "输出",
    "loss": "loss",
    "gradients": "梯度",
    "copy": "副本",
    "images": "图片",
    # ddp
    "DistributedDataParallel: every process keeps a model, gradients are averaged": (
        "DistributedDataParallel：每个进程各有一份模型，梯度求平均"
    ),
    "images of its own": "自己的那份图片",
    "all-reduce: gives every process the mean of all gradients": (
        "all-reduce：每个进程都得到所有梯度的平均值"
    ),
    "Equal weights and equal gradients: equal weights after the step.": [
        "权重相同，梯度相同，",
        "所以更新之后权重仍然相同。",
    ],
    "By default rank 0's buffers (BatchNorm's statistics) are sent too, before each forward().": [
        "默认情况下，每次 forward() 之前，",
        "还会广播 rank 0 的 buffer（BatchNorm 的统计量）。",
    ],
    # ring
    "All-reduce by a ring: each process sends to the next one only": (
        "环形 all-reduce：每个进程只发给下一个进程"
    ),
    "who sends to whom": "谁发给谁",
    "rank": "rank",
    "in each of the 6 steps, all at once: one part of four to the next": [
        "共 6 步；每一步，所有进程",
        "同时把四份中的一份",
        "发给下一个进程",
    ],
    "start": "开始",
    "after 3 steps": "3 步之后",
    "after 3 more": "再过 3 步",
    "each has its gradients, in four parts": ["各有自己的梯度，", "切成四份"],
    "each has added up one part": ["各有一份", "已经求完和"],
    "the sums went round: each has them all": ["求好的和再传一圈：", "每个进程都有全部"],
    "A process sends 6 parts of 4: 6/4 of its gradients, and receives as much.": (
        "每个进程发送 6 次、每次 1/4：共为梯度的 6/4，接收的也一样多。"
    ),
    # traffic
    "Bytes that the busiest process sends in a step: one for all against a ring": (
        "发送最多的进程每个 step 的发送量：全部经过一个进程，与环形对比"
    ),
    "MB that the busiest process sends in a step, ResNet-50 (it receives as much)": [
        "发送最多的进程每个 step 发送多少 MB，",
        "ResNet-50（接收的一样多）",
    ],
    "Upper bars: all through one process.": "上面的条：全部经过一个进程。",
    "Lower bars, ring: each process alike.": "下面的条：环形，每个进程都一样。",
    # horovod
    "Horovod: a thread beside each process averages the gradients that all have": (
        "Horovod：每个进程旁有一个线程，对所有进程都算好的梯度求平均"
    ),
    "model; backward() hands over each gradient": ["模型；backward() 交出", "每个梯度"],
    "Horovod's thread: what is ready is sent together": [
        "Horovod 的线程：把算好的",
        "梯度合在一起发送",
    ],
    "step() waits for the mean": "step() 等平均值",
    "Dashed: each thread tells that of process 0 which gradients it has; when all have one, "
    "process 0 says so, and all-reduce (orange) averages it.": [
        "虚线：每个线程告诉进程 0 的线程，自己算好了哪些梯度；",
        "某个梯度所有进程都算好了，进程 0 就发出通知，",
        "由 all-reduce（橙色）求平均。",
    ],
    # slurm
    "Slurm: a task is a process; ranks count on from node to node": (
        "Slurm：一个 task 就是一个进程；rank 逐个节点往后编号"
    ),
    "all meet at one port of node 0, made from the job's number": [
        "所有进程在节点 0 的同一个端口会合，",
        "端口由作业号算出",
    ],
    "rank is SLURM_PROCID, local_rank SLURM_LOCALID, world_size SLURM_NTASKS = 8.": [
        "rank 即 SLURM_PROCID，local_rank 即 SLURM_LOCALID，",
        "world_size 即 SLURM_NTASKS = 8。",
    ],
    "The full script also takes one task per node, and starts the processes itself.": [
        "完整脚本也支持每个节点一个 task，",
        "进程由它自己启动。",
    ],
    # evaluation
    "Ten images on three processes: padded to twelve, and as they are": (
        "十张图片、三个进程：补齐到十二张，与不补齐"
    ),
    "DistributedSampler": "DistributedSampler",
    "range(rank, 10, 3)": "range(rank, 10, 3)",
    "images 0 and 1 counted twice": "图片 0 和 1 算了两次",
    "one sum of hits, one of images": "正确数求和，图片数求和",
    "(mean of the three shares: 80.6 %)": "（三个准确率的平均值：80.6%）",
    "(dashed: padding)": "（虚线：补齐的）",
    # fsdp
    "FSDP: each GPU keeps a shard, and gathers one block at a time": (
        "FSDP：每张 GPU 只存一个分片，一次只把一个块拼完整"
    ),
    "weights": "权重",
    "blue: the shard that a GPU keeps; the rest is on the other GPUs": [
        "蓝色：这张 GPU 保存的分片；",
        "其余的在别的 GPU 上",
    ],
    "forward()": "forward()",
    "backward()": "backward()",
    "all-gather: the whole block's weights": "all-gather：拼出整个块的权重",
    "all-gather again": "再次 all-gather",
    "compute": "计算",
    "free": "释放",
    "reduce-scatter: mean gradients": "reduce-scatter：梯度求平均",
    "block 1, 2, 3 ...": "块 1、2、3……",
    "block ... 3, 2, 1": "块 ……3、2、1",
    "The next block is gathered while this one computes. Then each GPU's optimizer steps on its "
    "own shard.": [
        "计算这个块的同时，下一个块已经在 all-gather。",
        "最后，每张 GPU 的优化器只更新自己的分片。",
    ],
    # hang
    "A hang: rank 0 waits in all_reduce, rank 1 in the next forward": (
        "卡死：rank 0 卡在 all_reduce，rank 1 卡在下一次 forward"
    ),
    "if rank == 0: dist.all_reduce(correct)": "if rank == 0: dist.all_reduce(correct)",
    "time": "时间",
    "last step": "最后一个 step",
    "validation": "验证",
    "all_reduce": "all_reduce",
    "waits for rank 1's all_reduce: it never comes": [
        "等 rank 1 的 all_reduce：",
        "永远等不到",
    ],
    "if is false: next epoch": ["if 不成立：", "下一个 epoch"],
    "model(images)": "model(images)",
    "waits for rank 0's forward: it never comes": ["等 rank 0 的 forward：", "永远等不到"],
    "No error, no output, until the timeout: 10 minutes with NCCL, 30 with gloo.": [
        "没有报错，没有输出，直到超时：",
        "NCCL 是 10 分钟，gloo 是 30 分钟。",
    ],
    "Each call alone is right; but all processes must make the same calls, in the same order.": [
        "每个调用单独看都没错；",
        "但所有进程必须执行相同的调用，顺序也相同。",
    ],
    # set_epoch
    "Which images each rank takes in each step, with and without set_epoch": (
        "每个 rank 每个 step 取哪些图片：调用与不调用 set_epoch"
    ),
    "without set_epoch": "不调用 set_epoch",
    "sampler.set_epoch(epoch)": "sampler.set_epoch(epoch)",
    "every epoch the same batches": ["每个 epoch 的", "batch 都一样"],
    "a new order each epoch, equal parts": ["每个 epoch 换一个顺序，", "各份等长"],
}
# What has a number in it.
PATTERNS = [
    (r"process (\d), GPU (\d)", r"进程 \1，GPU \2"),
    (r"rank (\d), GPU (\d)", r"rank \1，GPU \2"),
    (r"(\d+) processes", r"\1 个进程"),
    (r"(\d+) through one", r"\1 经过一个进程"),
    (r"(\d+) ring", r"\1 环形"),
    (r"node (\d): srun starts 4 tasks", r"节点 \1：srun 启动 4 个 task"),
    (r"(\d) of (\d)", r"对 \1/\2"),
    (r"(\d+) of (\d+) right: ([\d.]+) %", r"\2 张中对 \1 张：\3%"),
    (r"((rank|step|epoch) \d)", r"\1"),
    (r"PROCID .*", None),
]
