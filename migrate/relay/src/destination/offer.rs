//! Offers the pages that this host has already to the source (W29b).

use super::shared::Shared;
use super::sink::DestinationSink;
use crate::threads::spawn;
use delta::{PageHash, Seed, SeedPages, MAX_OFFER, MAX_SEED};
use session::{FrameType, Outgoing, Sink};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A seed, and the most of its pages that the source remembers.
pub(crate) type Offered = (Arc<dyn Seed>, u32);

/// Offers that may wait for a link: ACKs, and the return path, wait behind them. They would wait
/// behind 1 MiB in the kernel too, which takes 84 ms at 100 Mbit/s.
const WAITING: usize = 2;
/// How often the thread looks whether the next offer may go.
const LOOK: Duration = Duration::from_millis(1);

/// Starts the thread that opens the seed and offers at most `most` of its pages. The migration goes
/// on without a seed if there is none.
///
/// The disk may never answer. So the thread has the session only while it sends.
pub(super) fn start(shared: &Arc<Shared>, sink: &Arc<DestinationSink>, (place, most): Offered) {
    let (weak, notices, page_size) = (Arc::downgrade(shared), sink.clone(), shared.page_size);
    let started = spawn("seed", move || {
        let opened = place.open(page_size);
        let Some(shared) = weak.upgrade() else { return };
        match opened {
            Ok(pages) => {
                // The source may refer to a page as soon as it is offered.
                shared.seed.open(pages.clone());
                drop(shared);
                offer(&*pages, most.min(MAX_SEED), &weak);
            }
            Err(reason) => {
                notices.notice(&format!("no seed, all pages will be sent: {reason}"));
                // The source may wait for the last offer.
                let last = delta::offer(0, &[0; 32], &[]);
                shared.session.send(Outgoing::Free(FrameType::Seed, last));
            }
        }
    });
    if let Err(error) = started {
        sink.notice(&format!("no seed, all pages will be sent: {error}"));
    }
}

/// Sends the hashes of the pages.
fn offer(pages: &dyn SeedPages, most: u32, shared: &Weak<Shared>) {
    let mut next = (0, Vec::<PageHash>::with_capacity(MAX_OFFER));
    let send = |(first, hashes): &mut (u32, Vec<PageHash>)| loop {
        let shared = shared.upgrade().filter(|shared| !shared.has_ended());
        let Some(shared) = shared else { return false };
        let session = &shared.session;
        if session.outbox().len() < WAITING && !session.has_unsent() {
            let offered = &shared.counters.seed_offered;
            offered.fetch_add(hashes.len() as u64, Ordering::Relaxed);
            let offer = delta::offer(*first, pages.key(), hashes);
            hashes.clear();
            session.send(Outgoing::Free(FrameType::Seed, offer));
            return true;
        }
        drop(shared);
        std::thread::sleep(LOOK);
    };
    pages.offer(most, &mut |first, hashes| {
        for (from, part) in (first..).step_by(MAX_OFFER).zip(hashes.chunks(MAX_OFFER)) {
            let follows = u64::from(next.0) + next.1.len() as u64 == u64::from(from);
            let is_full = !next.1.is_empty() && (!follows || next.1.len() + part.len() > MAX_OFFER);
            if is_full && !send(&mut next) {
                return false;
            }
            if next.1.is_empty() {
                next.0 = from;
            }
            next.1.extend(part);
        }
        true
    });
    if next.1.is_empty() || send(&mut next) {
        // The last offer has no pages.
        send(&mut next);
    }
}
