//! Temporary.
use std::time::Duration;
use vm_tests::swap::{Stage, SwapOn};
fn main() -> anyhow::Result<()> {
    vm_tests::cleanup::install()?;
    let stage = Stage::new()?;
    let what = std::env::args().nth(1).unwrap();
    let mut guest = stage.boot(&what.replace(' ', "")[..4], 256)?;
    if what == "zram" {
        guest.swap_on(SwapOn::Zram)?;
    } else {
        guest.serve(
            &format!("--size 512M --codec zstd --ublk --swap {}", &what[6..]),
            "page-cluster",
        )?;
    }
    let t = Duration::from_secs(100);
    std::thread::sleep(Duration::from_secs(3));
    println!("{}", guest.vm.sh("for p in $(pidof platen); do tr '\\0' ' ' < /proc/$p/cmdline | tail -c 60; grep -E 'VmRSS|RssAnon|RssShmem|RssFile' /proc/$p/status | tr -s '\\t\\n ' ' '; done; grep -E 'MemTotal|MemFree|Anon|Shmem:|Slab|Unev' /proc/meminfo | tr -s ' \\n' ' '", t)?);
    guest.redis()?;
    let mib: u64 = std::env::var("MIB").map_or(384, |m| m.parse().unwrap());
    let keys = mib * (1 << 20) / 4000;
    guest.background(
        "client",
        &format!("guest swap redis-fill /tmp/redis.sock keys={keys} size=4000"),
    )?;
    let mut last = String::new();
    loop {
        let log = guest.log("client")?;
        if log.contains("status ") {
            println!("{last}\n{}", log.lines().rev().take(2).collect::<Vec<_>>().join(" | "));
            if std::env::var_os("MIB").is_some() {
                for _ in 0..2 {
                    println!("{}", guest.vm.sh(&format!("guest swap redis-check /tmp/redis.sock keys={keys} size=4000 | tail -1"), Duration::from_secs(600))?);
                    println!("{}", guest.vm.sh("platen device stat; grep -v Filename /proc/swaps | tr -s '\\t ' ' '; grep SwapCached /proc/meminfo", t)?);
                }
                return Ok(());
            }
            println!("{}", guest.vm.sh("dmesg | grep -iE 'oom|killed' | tail -3; dmesg | grep -A45 'Mem-Info' | tail -50", t).unwrap_or_default());
            return Ok(());
        }
        last = guest.vm.sh("grep -E 'MemFree|Anon|Shmem:|Slab|SUnr|Unev|SwapFree|PageTables|SwapCached' /proc/meminfo | tr -s ' \\n' ' '; platen device stat 2>&1 | tr '\\n' ' '; cat /sys/block/zram0/mm_stat 2>/dev/null; for p in $(pidof platen) $(pidof redis-server); do grep -E 'VmRSS|RssAnon|RssShmem|RssFile' /proc/$p/status | tr -s '\\t\\n ' ' '; done", t)?;
        std::thread::sleep(Duration::from_millis(1500));
    }
}
