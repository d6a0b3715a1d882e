"""The report's page frame: styles and the small script, kept in one module so that the report needs no other file.

`__BODY__` and `__TITLE__` are replaced.  Nothing is loaded from anywhere: a content security policy in the page forbids it.
"""

from __future__ import annotations

from html import escape

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f27;--soft:#5d6674;--line:#e1e5eb;--good:#12805c;
--bad:#c03535;
--c0:#2b6fd4;--c1:#e0662b;--c2:#159a78;--c3:#8458cf;--c4:#c79200;--c5:#cf4476;--c6:#3aa3c4;--c7:#8a93a1}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--bg:#14171c;--card:#1d2128;--ink:#e8ebf0;--soft:#9aa4b2;
--line:#2f353f;
--good:#4cc79b;--bad:#f07f7f;--c0:#6aa5f5;--c1:#f29363;--c2:#4cc9a6;--c3:#b194ee;--c4:#e3b93e;--c5:#ee82a8;--c6:#74c8e2;
--c7:#7c8696}}
:root[data-theme=dark]{--bg:#14171c;--card:#1d2128;--ink:#e8ebf0;--soft:#9aa4b2;--line:#2f353f;
--good:#4cc79b;--bad:#f07f7f;--c0:#6aa5f5;--c1:#f29363;--c2:#4cc9a6;--c3:#b194ee;--c4:#e3b93e;--c5:#ee82a8;--c6:#74c8e2;
--c7:#7c8696}
:root[data-theme=light]{color-scheme:light}:root[data-theme=dark]{color-scheme:dark}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 60px}
header{display:flex;align-items:flex-start;gap:16px;margin-bottom:20px}
header div{flex:1;min-width:0}
h1{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:34px 0 12px}
.sub{color:var(--soft);margin:4px 0 0;font-size:14px}
.badge{display:inline-block;font-size:12px;font-weight:600;padding:2px 9px;border-radius:20px;border:1px solid currentColor;
vertical-align:4px;margin-left:10px;color:var(--soft)}
.badge.finished{color:var(--good)}.badge.failed{color:var(--bad)}
button{font:inherit;font-size:13px;color:var(--soft);background:var(--card);border:1px solid var(--line);border-radius:7px;
padding:5px 11px;cursor:pointer}
.alert{border:1px solid var(--bad);color:var(--bad);border-radius:10px;padding:10px 14px;margin:0 0 18px;white-space:pre-wrap;
overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:12px}
.tile,.chart,.card{background:var(--card);border:1px solid var(--line);border-radius:11px}
.tile{padding:12px 16px}.tile span{color:var(--soft);font-size:13px}.tile strong{display:block;font-size:25px;line-height:1.3;
font-weight:650}
.tile small{color:var(--soft);font-size:13px}.tile small.good{color:var(--good)}.tile small.bad{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(370px,100%),1fr));gap:14px}
.chart{margin:0;padding:12px 14px 6px;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;font-size:14px;min-height:24px}
figcaption b{overflow-wrap:anywhere}
.last{margin-left:auto;color:var(--soft)}.keys{display:flex;flex-wrap:wrap;gap:0 12px;font-size:12.5px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}.key em{font-style:normal;
color:var(--ink)}
.plot{position:relative}.plot svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:11px}svg .grid{stroke:var(--line);stroke-width:1}svg .base{stroke:var(--soft);
stroke-width:1;opacity:.6}
svg path{fill:none;stroke-linejoin:round;stroke-linecap:round}svg .line{stroke-width:2}svg .raw{stroke-width:1;opacity:.3}
.cross{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}
.tip{position:absolute;pointer-events:none;background:var(--ink);color:var(--bg);font-size:12px;line-height:1.45;
padding:5px 9px;border-radius:6px;
white-space:pre;z-index:2;display:none}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{padding:5px 10px;text-align:right;
border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}th{color:var(--soft);font-weight:500}tr:last-child td{border-bottom:0}
td i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
details>summary{cursor:pointer;padding:9px 14px;font-weight:550}details.card{margin-bottom:10px;overflow:hidden}
details.plain>summary{padding-left:0}
.charts.wide{grid-template-columns:repeat(auto-fill,minmax(min(500px,100%),1fr))}td:first-child{overflow-wrap:anywhere}
td:not(:first-child),th{white-space:nowrap}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr))}.sample{padding:12px 16px;
border-top:1px solid var(--line);min-width:0}.sample h4{font-size:12px;margin:8px 0 2px;color:var(--soft);font-weight:550}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.chips{display:flex;flex-wrap:wrap;gap:6px}.chip{font-size:12px;border:1px solid var(--line);border-radius:20px;
padding:1px 9px;color:var(--soft)}
.chip.good{color:var(--good);border-color:currentColor}.chip.bad{color:var(--bad);border-color:currentColor}
details.card>pre{padding:4px 16px 14px}.note{color:var(--soft);font-size:13px;margin:8px 0 0}
@media print{button{display:none}}
"""

SCRIPT = """
document.getElementById('theme').onclick=()=>{const r=document.documentElement,
 dark=r.dataset.theme?r.dataset.theme==='dark':matchMedia('(prefers-color-scheme:dark)').matches;r.dataset.theme=dark?'light':'dark'};
const badge=document.querySelector('.badge.running');
if(badge){const quiet=Date.now()/1e3-badge.dataset.written;if(quiet>badge.dataset.quiet){
 badge.className='badge interrupted';
 badge.textContent='no word for '+(quiet>7200?(quiet/3600).toFixed()+' h':(quiet/60).toFixed()+' min')}}
const short=v=>Math.abs(v)>=1e4||(v!==0&&Math.abs(v)<1e-3)?v.toExponential(3):String(+v.toPrecision(5));
for(const figure of document.querySelectorAll('figure.chart')){
 const holder=figure.querySelector('script');if(!holder)continue;
 const {series,box}=JSON.parse(holder.textContent),plot=figure.querySelector('.plot'),svg=plot.querySelector('svg');
 const [left,right,top,bottom]=box.m,[width,height]=box.s,tip=document.createElement('div');tip.className='tip';plot.append(tip);
 const cross=document.createElementNS('http://www.w3.org/2000/svg','line');cross.setAttribute('class','cross');
 cross.setAttribute('y1',top);cross.setAttribute('y2',height-bottom);cross.style.display='none';svg.append(cross);
 const nearest=(xs,x)=>{let a=0,b=xs.length-1;while(b-a>1){const m=(a+b)>>1;xs[m]<x?a=m:b=m}return x-xs[a]<xs[b]-x?a:b};
 plot.onmousemove=event=>{const r=svg.getBoundingClientRect(),u=(event.clientX-r.left)/r.width*width;
  const x=box.x[0]+(u-left)/(width-left-right)*(box.x[1]-box.x[0]);
  const hits=series.map(s=>({s,i:nearest(s.x,x)}));
  const step=hits.map(h=>h.s.x[h.i]).reduce((a,b)=>Math.abs(a-x)<=Math.abs(b-x)?a:b);
  const at=left+(step-box.x[0])/(box.x[1]-box.x[0])*(width-left-right);
  cross.setAttribute('x1',at);cross.setAttribute('x2',at);cross.style.display='';
  const shown=hits.filter(h=>h.s.x[h.i]===step).map(h=>(series.length>1?h.s.n+'  ':'')+short(h.s.y[h.i]));
  tip.textContent=['step '+step,...shown].join('\\n');
  tip.style.display='block';const px=at/width*r.width;tip.style.top='6px';
  tip.style.left=px>r.width/2?'auto':(px+10)+'px';tip.style.right=px>r.width/2?(r.width-px+10)+'px':'auto'};
 plot.onmouseleave=()=>{tip.style.display='none';cross.style.display='none'};
}
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline';script-src 'unsafe-inline'">
<title>__TITLE__</title><style>__STYLE__</style></head>
<body><main>
__BODY__
</main><script>__SCRIPT__</script></body></html>
"""


def page(title: str, body: str) -> str:
    """Returns the whole document; `title` is text, `body` is HTML."""
    frame = PAGE.replace("__TITLE__", escape(title)).replace("__STYLE__", STYLE.strip()).replace("__SCRIPT__", SCRIPT.strip())
    return frame.replace("__BODY__", body)
