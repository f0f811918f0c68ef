"""Every registered codec and wrapper, in the configurations that differ in code path."""

_SPECS = """
none
qsgd:bits=2  qsgd:bits=4  qsgd:bits=8,bucket_size=100  qsgd:bits=4,norm=l1  qsgd:bits=3,zero=false
qsgdinf:bits=3  qsgdinf:bits=3,zero=false,bucket_size=none  qsgdinf:bits=4,bucket_size=none
qsgdinf:bits=4,coder=fixed  qsgd:bits=4,coder=elias  qsgdinf:bits=3,zero=false,coder=delta  terngrad:coder=gamma
qsgdinf:bits=4,tail=exact,bucket_size=1000  qsgdinf:bits=10
terngrad  terngrad:clip=2.5  terngrad:bucket_size=none  terngrad:coder=fixed,bucket_size=1
nuqsgd:bits=3  nuqsgd:bits=3,zero=false  nuqsgd:bits=8  nuqsgd:bits=6,zero=false,p=0.7
luq  luq:bits=3  natural  natural:coder=fixed
alq:bits=3  alq:bits=4,zero=false  alq:bits=3,law=truncnorm,bucket_size=512
alq:bits=3,method=cd,tail=exact,bucket_size=1000  alq-n:bits=4,law=truncnorm-mean,bucket_size=512
alqg:bits=3  alqg-n:bits=3,law=truncnorm,zero=false
amq:bits=3  amq:bits=8,zero=false  amq-n:bits=4,method=gd,law=truncnorm
ecq  ecq:bits=1.5,norm=l2  ecq:bits=6,bucket_size=100
zipml:bits=3  zipml:bits=6  zipml:bits=4,zero=false,bucket_size=none  zipml:bits=8,coder=fixed,norm=l2
topk  topk:coder=fixed  topk:ratio=0.5  topk:ratio=0.05,chunk=64,values=intn:bits=2,group=64
topk:coder=fixed,values=qsgdinf:bits=3
mem-sgd  mem-sgd:ratio=0.1,coder=fixed  dropping  dropping:ratio=0.1,sample=0.05
randomk:ratio=0.25  randomk:ratio=0.25,scale=false
dgc  dgc:ratio=0.01,clip=1,warmup=8  adacomp  adacomp:bin_size=7
signsgd  signsgd:scale=none  signsgd:scale=energy  signsgd:scale=rms  signum  ef-signsgd  ef-signsgd:scale=rms
onebit  onebit:bucket_size=none
fp  fp:bits=2  fp:bits=4  fp:bits=5,rounding=stochastic  fp:bits=6,scale=error  fp:bits=4,scale=absmax
fp:bits=7,scale=mean,law=normal  fp:bits=8,scale=error,rounding=stochastic,scope=model
fp:e1m3  fp:e3m0,rounding=stochastic  fp:e7m0  fp:e5m2,exponent=14  fp:e4m3fn  fp:bits=6,block=7
fp:mxfp4  fp:mxfp6,rounding=stochastic  fp:mxfp8e5m2  fp:nvfp4  fp:e2m3,scale=rceil  fp:mxfp4,scale=even  ef:fp:bits=4
fp16  bf16  bf16:rounding=stochastic  int8  int8:block_size=none
intn  intn:bits=2,group=none  intn:bits=8,coder=fixed  nf4  fp4  dynamic8:block_size=100  uniform8
eden  eden:bits=1  eden:bits=0.5,block=256  eden:bits=2.5,coder=fixed  quantile8
powersgd  powersgd:rank=4,warm=false
prune  prune:sparsity=0.5,threshold=lognormal  prune:threshold=normal  prune:sparsity=0.95,threshold=topk
prune:sparsity=0  topk-prune  topk-prune:sparsity=0.5
mcgq  mcgq:amount=0.1  mcgq:bits=4  mcgq:bits=4,coder=delta  mcgq:accumulate=true,scale=accumulated,coder=omega
mcgq:with_norm=false,delta_k=1000  mcgq:accumulate=true,amount=0.1
ef:qsgdinf:bits=3  ef:topk:ratio=0.05  ef:topk-prune:sparsity=0.9  rotate:prune:allocation=heterogeneous
accumulate:topk:ratio=0.1  accumulate:terngrad  momentum:signsgd
ef:beta=0.8,reset=3,memory_bits=8:intn  ef:decay=0.9,memory_bits=4:topk
dct:topk:ratio=0.05,chunk=4096  dct:chunk=7:qsgdinf:bits=3  ef:decay=0.999:dct:topk:ratio=0.05,chunk=64
rotate:qsgdinf:bits=3  ef:rotate:signsgd  rotate:ef:signsgd
rotate:block=16,signs=fixed:fp:nvfp4,rounding=stochastic  rotate:rotate:qsgd:bits=3
minmax  minmax:bits=1  minmax:bits=3  minmax:bits=16  ef:minmax:bits=2
thc  thc:bits=1  thc:bits=3,granularity=7,block=64,outside=0.01
ef21:topk:ratio=0.05  ef21:momentum=0.9:intn  ef21:rotate:nf4
"""
VARIANTS = _SPECS.split()
