//! The everyday commands as methods of the client.

use std::time::Duration;

use crate::commands::{self, SetOptions, TimeToLive};
use crate::{Client, Error, FromValue, Ignore, ToArgument, ToPair};

/// Commands that are sent at once. The functions in [`commands`] make the same requests, for pipelines, transactions and for other
/// result types.
impl Client {
    /// Checks that the server answers.
    pub async fn ping(&self) -> Result<(), Error> {
        self.send(commands::ping()).await.map(|Ignore| ())
    }

    /// Returns the value of a key. Request an `Option`, which is `None` if the key does not exist.
    pub async fn get<T: FromValue>(&self, key: impl ToArgument) -> Result<T, Error> {
        self.send(commands::get(key).returning()).await
    }

    /// Sets the value of a key.
    pub async fn set(&self, key: impl ToArgument, value: impl ToArgument) -> Result<(), Error> {
        self.send(commands::set(key, value)).await
    }

    /// Sets the value of a key, which expires after this time.
    pub async fn set_for(
        &self,
        key: impl ToArgument,
        value: impl ToArgument,
        time_to_live: Duration,
    ) -> Result<(), Error> {
        let options = SetOptions::default().expire_in(time_to_live);
        self.send(commands::set_with(key, value, options)).await.map(|_| ())
    }

    /// Sets the value of a key unless it exists. Returns whether it was set.
    pub async fn set_if_absent(&self, key: impl ToArgument, value: impl ToArgument) -> Result<bool, Error> {
        self.send(commands::set_with(key, value, SetOptions::default().if_absent())).await
    }

    /// Returns the value of a key and deletes the key.
    pub async fn getdel<T: FromValue>(&self, key: impl ToArgument) -> Result<T, Error> {
        self.send(commands::getdel(key).returning()).await
    }

    /// Returns the values of keys. Request a `Vec<Option<_>>`.
    pub async fn mget<T: FromValue>(&self, keys: impl IntoIterator<Item: ToArgument>) -> Result<T, Error> {
        self.send(commands::mget(keys).returning()).await
    }

    /// Sets the values of keys, all at once.
    pub async fn mset(&self, pairs: impl IntoIterator<Item: ToPair>) -> Result<(), Error> {
        self.send(commands::mset(pairs)).await
    }

    /// Deletes keys and returns how many existed.
    pub async fn del(&self, keys: impl IntoIterator<Item: ToArgument>) -> Result<u64, Error> {
        self.send(commands::del(keys)).await
    }

    /// Returns whether a key exists.
    pub async fn exists(&self, key: impl ToArgument) -> Result<bool, Error> {
        self.send(commands::exists(key)).await
    }

    /// Sets the time to live of a key. Returns false if the key does not exist.
    pub async fn expire(&self, key: impl ToArgument, after: Duration) -> Result<bool, Error> {
        self.send(commands::expire(key, after)).await
    }

    /// Returns the time to live of a key.
    pub async fn ttl(&self, key: impl ToArgument) -> Result<TimeToLive, Error> {
        self.send(commands::ttl(key)).await
    }

    /// Adds one to a number and returns the sum.
    pub async fn incr(&self, key: impl ToArgument) -> Result<i64, Error> {
        self.send(commands::incr(key)).await
    }

    /// Adds to a number and returns the sum.
    pub async fn incrby(&self, key: impl ToArgument, by: i64) -> Result<i64, Error> {
        self.send(commands::incrby(key, by)).await
    }

    /// Subtracts one from a number and returns the difference.
    pub async fn decr(&self, key: impl ToArgument) -> Result<i64, Error> {
        self.send(commands::decr(key)).await
    }

    /// Returns a field of a hash. Request an `Option`, which is `None` if the field does not exist.
    pub async fn hget<T: FromValue>(&self, key: impl ToArgument, field: impl ToArgument) -> Result<T, Error> {
        self.send(commands::hget(key, field).returning()).await
    }

    /// Sets fields of a hash and returns how many are new.
    pub async fn hset(&self, key: impl ToArgument, pairs: impl IntoIterator<Item: ToPair>) -> Result<u64, Error> {
        self.send(commands::hset(key, pairs)).await
    }

    /// Returns all fields of a hash, as a map or as a struct in [`Serde`](crate::Serde).
    pub async fn hgetall<T: FromValue>(&self, key: impl ToArgument) -> Result<T, Error> {
        self.send(commands::hgetall(key).returning()).await
    }

    /// Deletes fields of a hash and returns how many existed.
    pub async fn hdel(&self, key: impl ToArgument, fields: impl IntoIterator<Item: ToArgument>) -> Result<u64, Error> {
        self.send(commands::hdel(key, fields)).await
    }

    /// Adds to a number in a field of a hash and returns the sum.
    pub async fn hincrby(&self, key: impl ToArgument, field: impl ToArgument, by: i64) -> Result<i64, Error> {
        self.send(commands::hincrby(key, field, by)).await
    }

    /// Prepends elements to a list one by one, so the last is first, and returns the new length.
    pub async fn lpush(
        &self,
        key: impl ToArgument,
        elements: impl IntoIterator<Item: ToArgument>,
    ) -> Result<u64, Error> {
        self.send(commands::lpush(key, elements)).await
    }

    /// Appends elements to a list and returns the new length.
    pub async fn rpush(
        &self,
        key: impl ToArgument,
        elements: impl IntoIterator<Item: ToArgument>,
    ) -> Result<u64, Error> {
        self.send(commands::rpush(key, elements)).await
    }

    /// Removes and returns the first element of a list. Request an `Option`, which is `None` if the list does not exist.
    pub async fn lpop<T: FromValue>(&self, key: impl ToArgument) -> Result<T, Error> {
        self.send(commands::lpop(key).returning()).await
    }

    /// Removes and returns the last element of a list. Request an `Option`, which is `None` if the list does not exist.
    pub async fn rpop<T: FromValue>(&self, key: impl ToArgument) -> Result<T, Error> {
        self.send(commands::rpop(key).returning()).await
    }

    /// Returns the elements of a list from `start` to `stop`, both inclusive. Negative positions count from the end.
    pub async fn lrange<T: FromValue>(&self, key: impl ToArgument, start: i64, stop: i64) -> Result<T, Error> {
        self.send(commands::lrange(key, start, stop).returning()).await
    }

    /// Returns the length of a list.
    pub async fn llen(&self, key: impl ToArgument) -> Result<u64, Error> {
        self.send(commands::llen(key)).await
    }

    /// Adds members to a set and returns how many are new.
    pub async fn sadd(&self, key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Result<u64, Error> {
        self.send(commands::sadd(key, members)).await
    }

    /// Removes members of a set and returns how many existed.
    pub async fn srem(&self, key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Result<u64, Error> {
        self.send(commands::srem(key, members)).await
    }

    /// Returns the members of a set, as a `HashSet` or a `Vec`.
    pub async fn smembers<T: FromValue>(&self, key: impl ToArgument) -> Result<T, Error> {
        self.send(commands::smembers(key).returning()).await
    }

    /// Returns whether a set has a member.
    pub async fn sismember(&self, key: impl ToArgument, member: impl ToArgument) -> Result<bool, Error> {
        self.send(commands::sismember(key, member)).await
    }

    /// Returns the score of a member of a sorted set.
    pub async fn zscore(&self, key: impl ToArgument, member: impl ToArgument) -> Result<Option<f64>, Error> {
        self.send(commands::zscore(key, member)).await
    }

    /// Adds to the score of a member of a sorted set and returns the sum.
    pub async fn zincrby(&self, key: impl ToArgument, by: f64, member: impl ToArgument) -> Result<f64, Error> {
        self.send(commands::zincrby(key, by, member)).await
    }

    /// Publishes a message to a channel and returns the number of receivers on this server.
    pub async fn publish(&self, channel: impl ToArgument, message: impl ToArgument) -> Result<u64, Error> {
        self.send(commands::publish(channel, message)).await
    }

    /// Publishes a message to a shard channel and returns the number of receivers on this server.
    pub async fn spublish(&self, channel: impl ToArgument, message: impl ToArgument) -> Result<u64, Error> {
        self.send(commands::spublish(channel, message)).await
    }

    /// Removes and returns the first element of the first list that is not empty, after the key of the list: request an
    /// `Option<(_, _)>`. Blocks while all are empty, over an exclusive connection; a timeout of zero means that there is no limit.
    pub async fn blpop<T: FromValue>(
        &self,
        keys: impl IntoIterator<Item: ToArgument>,
        timeout: Duration,
    ) -> Result<T, Error> {
        self.send(commands::blpop(keys, timeout).returning()).await
    }
}
