//! A carrier beside the destination QEMU.

use super::carriage::{Carriage, Outcome};
use anyhow::Context;
use host::{Phase, Record, Status};
use relay::{
    Destination, DestinationEnd, Host, Promise, QemuAddress, RelayError, Server, ServerConfig,
};
use serde_json::json;
use session::{Grants, Hello};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Takes the VM of the promised session, from the links that the service hands over.
pub(super) fn run(
    carriage: Carriage,
    promise: &Promise,
    links: &Receiver<(TcpStream, String)>,
) -> anyhow::Result<Outcome> {
    let settings = &carriage.settings;
    let port = carriage.carrier.record().port;
    let address = SocketAddr::from((settings.me().deliver(), port));
    let config = ServerConfig {
        targets: vec![(promise.hello.name.clone(), QemuAddress::Tcp(address))],
        acceptor: Some(settings.acceptor()?.0),
        decompress_threads: settings.decompress_threads(),
        qat: None,
        page_size: settings.config.page_size,
        grants: Grants::default(),
        // As the front has granted it.
        delta_cache: promise.hello.delta_cache,
        resume: Duration::from_secs(settings.config.resume_timeout),
    };
    let receiver = Arc::new(Receiving { carriage, outcome: Mutex::new(None) });
    let server = Server::new(config, receiver.clone())?;
    let stopping = server.clone();
    receiver.carriage.stop_by(move || stopping.stop());
    server.carry(promise, links)?;
    let outcome = receiver.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
    outcome.context("the session has ended without an outcome")
}

struct Receiving {
    carriage: Carriage,
    outcome: Mutex<Option<Outcome>>,
}

impl Host for Receiving {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        // libvirt has set the destination QEMU up.
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &Destination) {
        let progress = |record: &mut Record| {
            record.plain = destination.counters().plain.load(Ordering::Relaxed);
            record.transferred = destination.session().bytes_in.load(Ordering::Relaxed);
            record.ram = destination.counters().ram.load(Ordering::Relaxed);
            record.ram_sent =
                destination.counters().ram_seen(self.carriage.settings.config.page_size);
            let begun = destination.has_begun();
            // QEMU has all it needs: the next VM may have its port.
            let over = destination.is_confirmed() || destination.session().failure().is_some();
            record.holds_port = !over;
            record.phase = match (begun, over) {
                (_, true) => Phase::Ending,
                (true, false) => Phase::Active,
                (false, false) => Phase::Opening,
            };
        };
        let report = || json!({ "status": "completed" }).to_string().into_bytes();
        let result = self.carriage.while_telling(progress, || destination.run(report));
        // What may still follow is the question of a source that has lost its links (W28).
        self.carriage.carrier.update(|record| {
            record.holds_port = false;
            if destination.has_begun() {
                // The migration may have been shorter than the time between two looks.
                record.reached = Phase::Active;
            }
            record.phase = Phase::Ending;
        });
        let outcome = outcome(destination.has_begun(), result);
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }

    fn notice(&self, text: &str) {
        self.carriage.say(text);
    }
}

fn outcome(begun: bool, result: Result<DestinationEnd, RelayError>) -> Outcome {
    match result {
        Ok(DestinationEnd { confirmed: true, .. }) => {
            Outcome { status: Status::Completed, cause: None }
        }
        Ok(_) => Outcome {
            status: Status::Unconfirmed,
            cause: Some("the source QEMU used no return path".into()),
        },
        Err(error) => {
            let error = anyhow::Error::from(error);
            Outcome::failed(if begun {
                format!("{error:#}")
            } else {
                format!("the source left before it migrated: {error:#}")
            })
        }
    }
}
