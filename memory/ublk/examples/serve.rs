//! Serves a compressed disk by ublk until standard input ends: `serve SIZE_MIB`.
//!
//! For trying the driver: without supervisor, check or swap, which `platen device serve --ublk`
//! has.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use device::{Device, DeviceOptions};
use store::{Keeper, Store};
use ublk::{Options, Server};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let size: u64 = words.first().map_or(Ok(64), |word| word.parse())?;
    let store = Store::create(
        size * 256,
        store::Options { reserve: 8 << 20, ..store::Options::default() },
    )?;
    let _keeper = Keeper::start(&store)?;
    let device = Device::new(&store, &DeviceOptions::default())?;
    let options = Options::new(store.pages(), None, 8 << 20);
    let server = Server::create(&device, None, &options, &|_| {})?;
    println!("serving {}: {:?}", server.disk().display(), options.geometry);
    // Until standard input ends.
    let ended = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = Arc::clone(&ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        seen.store(true, std::sync::atomic::Ordering::Release);
    });
    while !ended.load(std::sync::atomic::Ordering::Acquire) {
        if let Some((queue, result)) = server.wait(Duration::from_millis(200)) {
            println!("queue {queue} ended: {result:?}");
            break;
        }
    }
    println!("{:?} {:?}", device.stats(), store.stats());
    server.stop()?;
    Ok(())
}
