//! Loom models of workers and results: every interleaving, and every value that a weakly ordered
//! load may return.
//!
//! `scripts/loom` runs them, also with each ordering, fence or step taken away in turn, and then
//! requires a failure. A job that waits for another job turns a worker that sleeps beside a waiting
//! job into a deadlock, which loom reports.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread::{self, JoinHandle};

use crate::job::Job;
use crate::results::{Popped, Results};
use crate::workers::Workers;

/// Explores `model` with at most `preemptions` forced switches; blocking switches are free.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Two jobs that meet: neither returns before both have begun.
#[derive(Default)]
struct Meeting {
    here: Mutex<u32>,
    came: Condvar,
}

impl Meeting {
    fn attend(&self) {
        let mut here = self.here.lock().expect("no model panics here");
        *here += 1;
        self.came.notify_all();
        while *here < 2 {
            here = self.came.wait(here).expect("no model panics here");
        }
    }

    /// Sleeps until both jobs have begun. A model closes its workers only then: that wakes them
    /// all.
    fn wait(&self) {
        let mut here = self.here.lock().expect("no model panics here");
        while *here < 2 {
            here = self.came.wait(here).expect("no model panics here");
        }
    }
}

/// A job of a model.
enum Work {
    /// Returns at once.
    Brief(u32),
    /// Returns when both jobs of the meeting run.
    Meets(Arc<Meeting>),
}

impl Job for Work {
    type Output = u32;
    type Context = ();

    fn run(self, (): &mut ()) -> u32 {
        match self {
            Work::Brief(number) => number,
            Work::Meets(meeting) => {
                meeting.attend();
                0
            }
        }
    }
}

fn start(workers: &Arc<Workers<Work>>) -> Vec<JoinHandle<()>> {
    let start = |number| {
        let workers = Arc::clone(workers);
        thread::spawn(move || workers.work_only(number, ()))
    };
    (0..workers.threads()).map(start).collect()
}

fn join(threads: Vec<JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A meeting, and its two jobs.
fn meeting() -> (Arc<Meeting>, [Work; 2]) {
    let meeting = Arc::<Meeting>::default();
    let jobs = [(), ()].map(|()| Work::Meets(Arc::clone(&meeting)));
    (meeting, jobs)
}

/// The workers run until the jobs of the meeting have begun: to close them wakes them all.
fn finish(workers: &Workers<Work>, meeting: &Meeting, threads: Vec<JoinHandle<()>>) {
    meeting.wait();
    workers.close();
    join(threads);
}

#[test]
fn a_job_waits_for_no_worker_that_runs_another() {
    explore(1, || {
        let workers = Arc::new(Workers::new(2, 2));
        let results = Results::new(2);
        let (meeting, [one, other]) = meeting();
        workers.queue(1, one, &results);
        let threads = start(&workers);
        assert!(workers.try_submit(other, &results).is_ok());
        finish(&workers, &meeting, threads);
    });
}

/// The submitter plays worker 0, which takes a job for which worker 1 was woken.
#[test]
fn a_worker_whose_job_another_has_taken_gets_the_next_one() {
    explore(3, || {
        let workers = Arc::new(Workers::new(2, 2));
        let results = Results::new(2);
        let (_, [one, other]) = meeting();
        let idle = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || workers.work_only(1, ()))
        };
        assert!(workers.try_submit(one, &results).is_ok());
        let taken = workers.take(0);
        // A job in the ring of worker 1 would wake it in any case.
        workers.start_at(0);
        assert!(workers.try_submit(other, &results).is_ok());
        let job = taken.or_else(|| workers.take(0)).expect("worker 1 has one job at a time");
        job.run(&mut ());
        workers.close();
        idle.join().unwrap();
    });
}

/// The workers have emptied their rings, which the submitter does not see yet.
#[test]
fn a_job_whose_chosen_worker_appears_full_is_run() {
    explore(1, || {
        let workers = Arc::new(Workers::new(2, 2));
        let results = Results::new(2);
        let (meeting, [one, other]) = meeting();
        workers.queue(0, Work::Brief(1), &results);
        workers.queue(0, Work::Brief(2), &results);
        workers.queue(1, one, &results);
        workers.queue(1, Work::Brief(3), &results);
        workers.start_at(1);
        let threads = start(&workers);
        if let Err(other) = workers.try_submit(other, &results) {
            assert!(workers.submit_wait(other, &results).is_ok());
        }
        finish(&workers, &meeting, threads);
    });
}

/// Worker 0 is idle and has just found a job, when it is chosen for another one.
#[test]
fn a_job_whose_chosen_worker_has_taken_another_job_is_run() {
    explore(2, || {
        let workers = Arc::new(Workers::new(2, 2));
        let results = Results::new(2);
        let (meeting, [one, other]) = meeting();
        workers.mark_idle(0);
        let idle = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || workers.work_only(1, ()))
        };
        let chosen = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || {
                workers.has_found_one(0);
                one.run(&mut ());
                workers.work_only(0, ());
            })
        };
        assert!(workers.try_submit(other, &results).is_ok());
        finish(&workers, &meeting, vec![idle, chosen]);
    });
}

#[test]
fn a_submitter_that_waits_for_room_is_woken() {
    explore(3, || {
        let workers = Arc::new(Workers::new(1, 2));
        let results = Results::new(2);
        workers.queue(0, Work::Brief(1), &results);
        workers.queue(0, Work::Brief(2), &results);
        let threads = start(&workers);
        assert!(workers.submit_wait(Work::Brief(3), &results).is_ok());
        workers.close();
        join(threads);
    });
}

#[test]
fn a_job_is_done_or_returned_when_the_workers_are_closed_meanwhile() {
    explore(2, || {
        let workers = Arc::new(Workers::new(1, 2));
        let results = Results::new(2);
        let worker = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || workers.work(0, ()))
        };
        let closer = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || workers.close())
        };
        let submitted = workers.try_submit(Work::Brief(7), &results).is_ok();
        closer.join().unwrap();
        worker.join().unwrap();
        assert_eq!(results.pop(), submitted.then_some(7));
    });
}

/// As above without results, so that more interleavings can be explored: a worker that ends sees
/// every job that was accepted.
#[test]
fn no_job_remains_in_a_ring_when_the_workers_are_closed_meanwhile() {
    explore(3, || {
        let workers = Arc::new(Workers::new(1, 2));
        let results = Results::new(2);
        let worker = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || workers.work_only(0, ()))
        };
        let closer = {
            let workers = Arc::clone(&workers);
            thread::spawn(move || workers.close())
        };
        let _ = workers.try_submit(Work::Brief(7), &results);
        closer.join().unwrap();
        worker.join().unwrap();
        assert!(workers.take(0).is_none());
    });
}

#[test]
fn all_outputs_are_present_when_all_jobs_are_finished() {
    explore(3, || {
        let results = Results::new(2);
        results.expect_one();
        let worker = {
            let results = Arc::clone(&results);
            thread::spawn(move || results.finish_one(5))
        };
        results.wait_finished();
        assert_eq!(results.pop(), Some(5));
        worker.join().unwrap();
    });
}

/// The thread that closes them knows of the push, which is another's.
#[test]
fn closed_results_return_the_outputs_pushed_before() {
    explore(3, || {
        let results = Results::new(2);
        let pusher = {
            let results = Arc::clone(&results);
            thread::spawn(move || assert_eq!(results.push(5), Ok(())))
        };
        let closer = {
            let results = Arc::clone(&results);
            thread::spawn(move || {
                pusher.join().unwrap();
                results.close();
            })
        };
        assert_eq!(results.pop_until(None), Popped::Item(5));
        assert_eq!(results.pop_until(None), Popped::Closed);
        closer.join().unwrap();
    });
}
