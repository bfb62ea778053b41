//! Scenarios that several programs share out among themselves.
//!
//! Each program has a shard: scenarios that follow each other, because those share VMs, and to boot
//! one under TCG takes as much CPU as two scenarios. A program that has run its shard goes on with
//! the last scenarios of the others, which are the last ones that their own programs would run.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::{bail, Context, Result};

/// A program's part of all scenarios.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// From 1.
    number: usize,
    count: usize,
    /// The folder in which each program makes a file for a scenario that it begins. Without one,
    /// the program runs its own shard only.
    claims: Option<PathBuf>,
}

impl Default for Shard {
    /// All scenarios.
    fn default() -> Self {
        Self { number: 1, count: 1, claims: None }
    }
}

impl Shard {
    /// Parses `NUMBER/COUNT`.
    ///
    /// # Errors
    /// If the number is not one from 1 to the count.
    pub fn set(&mut self, words: &str) -> Result<()> {
        let numbers =
            words.split_once('/').and_then(|(n, of)| Some((n.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((number, count)) if (1..=count).contains(&number) => {
                (self.number, self.count) = (number, count);
                Ok(())
            }
            _ => bail!("--shard={words}: NUMBER/COUNT, NUMBER from 1 to COUNT"),
        }
    }

    /// Sets the folder of the claims.
    pub fn share(&mut self, folder: impl Into<PathBuf>) {
        self.claims = Some(folder.into());
    }

    /// The scenarios of `len` that this program may run, in its order.
    pub fn order(&self, len: usize) -> Vec<usize> {
        let own = |number: usize| -> Range<usize> {
            len * (number - 1) / self.count..len * number / self.count
        };
        let mut order: Vec<usize> = own(self.number).collect();
        if self.claims.is_some() {
            let others = (1..self.count).map(|next| (self.number - 1 + next) % self.count + 1);
            order.extend(others.flat_map(|number| own(number).rev()));
        }
        order
    }

    /// Whether no other program has begun this scenario. From now on this one has.
    ///
    /// # Errors
    /// If no file can be made.
    pub fn claim(&self, scenario: usize) -> Result<bool> {
        let Some(folder) = &self.claims else { return Ok(true) };
        let path = folder.join(scenario.to_string());
        match File::create_new(&path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(words: &str) -> Shard {
        let mut shard = Shard::default();
        shard.set(words).unwrap();
        shard
    }

    #[test]
    fn shards_are_all_scenarios_and_each_once() {
        let orders: Vec<Vec<usize>> =
            (1..=3).map(|number| shard(&format!("{number}/3")).order(8)).collect();
        assert_eq!(orders, [vec![0, 1], vec![2, 3, 4], vec![5, 6, 7]]);
        assert_eq!(Shard::default().order(2), [0, 1]);
        for wrong in ["0/3", "4/3", "1", "a/b", "1/0"] {
            assert!(Shard::default().set(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_program_that_has_finished_takes_the_last_scenarios_of_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let [mut first, mut second] = [shard("1/2"), shard("2/2")];
        first.share(folder.path());
        second.share(folder.path());
        assert_eq!(first.order(5), [0, 1, 4, 3, 2]);
        assert_eq!(second.order(5), [2, 3, 4, 1, 0]);
        // The first one is slow: the second one takes the rest.
        assert!(first.claim(0).unwrap());
        let taken: Vec<usize> =
            second.order(5).into_iter().filter(|next| second.claim(*next).unwrap()).collect();
        assert_eq!(taken, [2, 3, 4, 1]);
        assert!(first.order(5).into_iter().all(|next| !first.claim(next).unwrap()));
    }

    #[test]
    fn a_folder_that_has_gone_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut shard = Shard::default();
        shard.share(folder.path().join("gone"));
        assert!(format!("{:#}", shard.claim(7).unwrap_err()).contains("gone/7"));
    }
}
