// A collection with one row, which any client may update and subscribe to.
migrate((app) => {
  const rows = new Collection({
    type: 'base',
    name: 'rows',
    listRule: '',
    viewRule: '',
    updateRule: '',
    fields: [
      { type: 'number', name: 'count' },
      { type: 'text', name: 'text' },
    ],
  });
  app.save(rows);
  const row = new Record(rows);
  row.set('id', 'row000000000007');
  row.set('count', 1000000);
  row.set('text', 'x'.repeat(200));
  app.save(row);
});
